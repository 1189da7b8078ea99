"""Tests that need a GPU. They run with as many hardware queues as workers do (`deploy.processes.nccl_interface`)."""

import os

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # read when CUDA starts
