"""Entry point: `python -m tandem.vllm_worker CONFIG.json`, in an environment that has vLLM."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path

import msgspec

from tandem.runtime.processes.process import run_process
from tandem.vllm_worker.vllm_worker_config import VllmWorkerConfig


def main() -> None:
    import torch

    from tandem.vllm_worker.vllm_host import load_vllm
    from tandem.vllm_worker.vllm_worker import VllmWorker

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # not read again in a forked process
    config = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=VllmWorkerConfig)
    run_process(config.worker_id, config.logs, lambda: VllmWorker(config, partial(load_vllm, config)))


if __name__ == "__main__":
    main()
