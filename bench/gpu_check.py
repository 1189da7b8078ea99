"""Everything that needs a GPU, unattended: tests, benchmarks of engine and KV transfer, a cluster that shares the GPU.

    python -m bench.gpu_check [--quick] [--json FILE]

Each part runs in a process of its own under a time limit and is recorded, whether it passes or not, so that one run on
a borrowed machine tells as much as it can. All of it takes less than nine minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

from bench.gpu_engine import LLAMA_8B, SMALL
from bench.report import Aim, Report, add_common_options, finish

TESTS_LIMIT_S, ENGINE_LIMIT_S, TRANSFER_LIMIT_S, CLUSTER_START_LIMIT_S, LOAD_LIMIT_S = 110, 120, 105, 75, 25
RATES = (12, 24, 48, 96)


def run(command: list[str], limit_s: float) -> tuple[int, str]:
    """Exit status (124 when it took too long) and the end of what it printed."""
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


def run_cluster(quick: bool, port: int = 8377) -> dict[str, Any]:
    """1,024 tokens in and 6 out at rising rates, prefill and decode on one GPU."""
    from transformers import LlamaConfig

    from bench.noise_model import ensure_noise_model

    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        tokenizer = ensure_noise_model()
        LlamaConfig(**(SMALL if quick else LLAMA_8B), eos_token_id=0).save_pretrained(model)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            (model / file).write_bytes((tokenizer / file).read_bytes())
        command = [
            sys.executable, "-m", "tandem.deploy.cli", "up", "--model", str(model), "--load-format", "dummy", "--dtype",
            "bfloat16", "--device", "cuda", "--port", str(port), "--kv-cache-gib", "16", "--max-model-len", "8192",
            "--max-num-batched-tokens", "2048", "--served-model-name", "m",
        ]  # fmt: skip
        log = Path(folder) / "log"
        with log.open("wb") as output:
            # Two ranks on one GPU: NCCL 2.30 or newer allows it when it is told to.
            env = {**os.environ, "NCCL_MULTI_RANK_GPU_ENABLE": "1"}
            cluster = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=env)
        try:
            if not is_healthy(port, cluster):
                return {"status": 1, "output": log.read_text(errors="replace")[-4000:]}
            for rate in RATES:
                result[str(rate)] = run_benchmark(
                    "load", LOAD_LIMIT_S, "--url", f"http://127.0.0.1:{port}", "--model", "m", "--request-rate",
                    str(rate), "--num-prompts", "96", "--input-len", "1024", "--output-len", "6",
                )  # fmt: skip
        finally:
            cluster.terminate()
            try:
                cluster.wait(10)
            except subprocess.TimeoutExpired:
                cluster.kill()
    return result


def is_healthy(port: int, cluster: subprocess.Popen[bytes]) -> bool:
    deadline = time.monotonic() + CLUSTER_START_LIMIT_S
    while time.monotonic() < deadline and cluster.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
                if answer.status == 200:
                    return True
        except (urllib.error.URLError, OSError):
            pass
        time.sleep(1)
    return False


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_check", description=__doc__)
    add_common_options(parser)
    options = parser.parse_args()
    _, gpu = run(["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"], 20)
    quick = ["--quick"] if options.quick else []
    figures: dict[str, Any] = {
        "gpu": gpu.strip(),
        "tests": run_tests(),
        "engine": run_benchmark("gpu_engine", ENGINE_LIMIT_S, *quick),
        "kv_transfer": run_benchmark("gpu_kv_transfer", TRANSFER_LIMIT_S, *quick),
        "cluster": run_cluster(options.quick),
    }
    aims = [Aim(**aim) for part in ("engine", "kv_transfer") for aim in figures[part].get("aims", [])]
    finish(Report.of("gpu_check", figures, aims), options.json)


if __name__ == "__main__":
    main()
