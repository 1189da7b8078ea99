"""Runs everything that needs a GPU, unattended: tests, engine and KV transfer benchmarks, a cluster on one GPU.

    python -m bench.gpu.check [--quick] [--json FILE]

Each part runs in its own process under a time limit, and its result is recorded whether it passes or fails. The whole
run takes less than nine minutes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

from transformers import LlamaConfig

from bench.gpu.engine import LLAMA_8B, SMALL
from bench.noise_model import ensure_noise_model
from bench.ports import free_port
from bench.support.report import Aim, Report, add_common_options, finish
from bench.support.servers import MODEL, server, tandem

TESTS_LIMIT_S, ENGINE_LIMIT_S, TRANSFER_LIMIT_S, LOAD_LIMIT_S = 110, 120, 105, 25
RATES = (12, 24, 48, 96)


def run(command: list[str], limit_s: float) -> tuple[int, str]:
    """Returns the exit status (124 after a time-out) and the end of the output."""
    try:
        done = subprocess.run(
            command, timeout=limit_s, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        )
    except subprocess.TimeoutExpired as error:
        printed = error.stdout or b""
        return 124, (printed if isinstance(printed, str) else printed.decode(errors="replace"))[-4000:]
    return done.returncode, done.stdout[-4000:]


def run_tests() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "junit.xml"
        status, output = run([sys.executable, "-m", "pytest", "-q", "tests/gpu", f"--junitxml={report}"], TESTS_LIMIT_S)
        outcomes: dict[str, str] = {}
        if report.is_file():
            for case in ElementTree.parse(report).iter("testcase"):
                problem = next((e for e in case if e.tag in ("failure", "error", "skipped")), None)
                first_line = "" if problem is None else (problem.get("message") or "").splitlines()[:1]
                outcomes[str(case.get("name"))] = "passed" if problem is None else f"{problem.tag}: {first_line}"
    return {"status": status, "outcomes": outcomes, "output": output if status else ""}


def run_benchmark(name: str, limit_s: float, *options: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.json"
        status, output = run([sys.executable, "-m", f"bench.{name}", *options, "--json", str(file)], limit_s)
        found = json.loads(file.read_text()) if file.is_file() else {}
    return {"status": status, "output": output if status else "", **found}


def run_cluster(quick: bool) -> dict[str, Any]:
    """Sends prompts of 1,024 tokens (6 output tokens) at rising rates to two workers on one GPU."""
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        model, port = Path(folder) / "model", free_port()
        tokenizer = ensure_noise_model()
        LlamaConfig(**(SMALL if quick else LLAMA_8B), eos_token_id=0).save_pretrained(model)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            (model / file).write_bytes((tokenizer / file).read_bytes())
        command = tandem(
            model, port, "--load-format", "dummy", "--dtype", "bfloat16", "--device", "cuda", "--kv-cache-gib", "16",
            "--max-model-len", "8192", "--max-num-batched-tokens", "2048",
        )  # fmt: skip
        # NCCL 2.30 or newer allows two ranks on one GPU when this variable is set.
        with server(command, port, {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}):
            for rate in RATES:
                figures = Path(folder) / f"{rate}.json"
                load = [
                    sys.executable, "-m", "locust", "-f", "bench/locustfile.py", "--headless", "--users", "1",
                    "--host", f"http://127.0.0.1:{port}", "--model", MODEL, "--request-rate", str(rate),
                    "--run-time", "5s", "--stop-timeout", "10", "--input-len", "1024", "--output-len", "6",
                    "--figures", str(figures),
                ]  # fmt: skip
                status, output = run(load, LOAD_LIMIT_S)
                found = json.loads(figures.read_text()) if figures.is_file() else {}
                result[str(rate)] = {"status": status, "output": output if status else "", **found}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.check", description=__doc__)
    add_common_options(parser)
    options = parser.parse_args()
    _, gpu = run(["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"], 20)
    quick = ["--quick"] if options.quick else []
    figures: dict[str, Any] = {
        "gpu": gpu.strip(),
        "tests": run_tests(),
        "engine": run_benchmark("gpu.engine", ENGINE_LIMIT_S, *quick),
        "kv_transfer": run_benchmark("gpu.kv_transfer", TRANSFER_LIMIT_S, *quick),
    }
    try:
        figures["cluster"] = run_cluster(options.quick)
    except SystemExit as error:  # raised when the cluster does not start
        figures["cluster"] = {"status": 1, "output": str(error)}
    aims = [Aim(**aim) for part in ("engine", "kv_transfer") for aim in figures[part].get("aims", [])]
    finish(Report.of("gpu.check", figures, aims), options.json)


if __name__ == "__main__":
    main()
