"""Finds environments with vLLM for the tests that need them."""

from __future__ import annotations

import os

import pytest

from tandem.vllm_worker.versions import SUPPORTED_VERSIONS


def vllm_python() -> str:
    """Returns the interpreter of an environment with vLLM. Skips the test where there is none."""
    python = os.environ.get("TANDEM_TEST_VLLM_PYTHON")
    if not python:
        pytest.skip("TANDEM_TEST_VLLM_PYTHON names no Python with vLLM (tandem engine install vllm FOLDER)")
    return python


def older_vllm_python() -> str:
    """Returns the interpreter of an environment with the oldest supported version, or skips the test."""
    python = os.environ.get("TANDEM_TEST_OLDER_VLLM_PYTHON")
    if not python:
        version = SUPPORTED_VERSIONS[0]
        install = f"tandem engine install vllm FOLDER --version {version}"
        pytest.skip(f"TANDEM_TEST_OLDER_VLLM_PYTHON names no Python with vLLM {version} ({install})")
    return python
