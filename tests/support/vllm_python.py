"""Finds an environment with vLLM for the tests that need it."""

from __future__ import annotations

import os

import pytest


def vllm_python() -> str:
    """Returns the interpreter of an environment with vLLM. Skips the test where there is none."""
    python = os.environ.get("TANDEM_TEST_VLLM_PYTHON")
    if not python:
        pytest.skip("TANDEM_TEST_VLLM_PYTHON names no Python with vLLM (tandem engine install vllm FOLDER)")
    return python
