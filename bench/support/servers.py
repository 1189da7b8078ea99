"""Starts `tandem up` or vLLM for a benchmark and stops the whole process group afterwards."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

from tests.support.ports import free_port

F = TypeVar("F")

START_TIMEOUT_S = 400.0
STOP_TIMEOUT_S = 20.0
MODEL = "m"
"""Name under which every server serves its model."""


def tandem(model: Path, port: int, *flags: str) -> list[str]:
    """Command line of a cluster with default settings apart from `flags`."""
    return [
        sys.executable, "-m", "tandem.deploy.cli", "up", "--model", str(model), "--served-model-name", MODEL,
        "--port", str(port), *flags,
    ]  # fmt: skip


def add_vllm_option(parser: argparse.ArgumentParser, required: bool = False) -> None:
    parser.add_argument("--vllm", type=Path, required=required, help="virtual environment with vLLM")


def vllm_serve(
    venv: Path, model: Path, port: int, *flags: str, dtype: str = "bfloat16", max_model_len: int = 4096
) -> tuple[list[str], dict[str, str]]:
    """Command line and environment of one vLLM on CPUs with 2 GiB of KV cache.

    Settings that neither `flags` nor the parameters name are vLLM's defaults.
    """
    command = [
        str(venv / "bin" / "vllm"), "serve", str(model), "--port", str(port), "--served-model-name", MODEL,
        "--dtype", dtype, "--max-model-len", str(max_model_len), *flags,
    ]  # fmt: skip
    env = {
        "PATH": f"{(venv / 'bin').absolute()}:{os.environ['PATH']}",
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }
    return command, env


def vllm_pair(venv: Path, model: Path, port: int) -> list[str]:
    """Command line of vLLM's own prefill/decode pair (`bench.support.vllm_pair`). It may take twice START_TIMEOUT_S."""
    return [sys.executable, "-m", "bench.support.vllm_pair", str(venv), str(model), str(port)]


def beside_vllm(
    venv: Path | None, model: Path, measure: Callable[[int], Coroutine[Any, Any, F]], max_model_len: int = 4096
) -> dict[str, F]:
    """Measures Tandem, and vLLM unless `venv` is None, both on the same port with default settings."""
    port, figures = free_port(), {}
    if venv is not None:
        command, env = vllm_serve(venv, model, port, max_model_len=max_model_len)
        with server(command, port, env):
            figures["vllm"] = asyncio.run(measure(port))
    with server(tandem(model, port), port):
        figures["tandem"] = asyncio.run(measure(port))
    return figures


@contextlib.contextmanager
def server(
    command: list[str], port: int, env: dict[str, str] | None = None, start_timeout_s: float = START_TIMEOUT_S
) -> Iterator[int]:
    """Yields the process id once a completion works; kills the process group at the end.

    Raises SystemExit when the server ends or is not ready within `start_timeout_s`.
    """
    with tempfile.TemporaryDirectory() as logs:
        process = subprocess.Popen(
            command,
            start_new_session=True,
            env={**os.environ, "LOG_DIR": logs, **(env or {})},
            stdout=subprocess.DEVNULL,
        )
        try:
            deadline = time.monotonic() + start_timeout_s
            while not is_up(port):
                if process.poll() is not None:
                    raise SystemExit(f"{Path(command[0]).name} ended with status {process.returncode}")
                if time.monotonic() > deadline:
                    raise SystemExit(f"{Path(command[0]).name} was not ready within {start_timeout_s:.0f} s")
                time.sleep(0.5)
            yield process.pid
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_TIMEOUT_S)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def is_up(port: int) -> bool:
    try:
        complete(port, "up?", 2)
        return True
    except OSError:  # URLError is one
        return False


def complete(port: int, prompt: str | list[int], max_tokens: int) -> None:
    """Sends one completion and waits for it. Raises URLError or OSError."""
    body = json.dumps({"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        response.read()
