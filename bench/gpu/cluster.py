"""A cluster of a prefill and a decode worker on one GPU, and one engine on the same GPU, at rising rates.

    python -m bench.gpu.cluster [--device cpu] [--quick] [--json FILE]

Prompts of 1,024 tokens, 32 output tokens, Poisson arrivals by locust. The model has the shape of Llama 3.1 8B, or is
small with --quick.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.gpu.engine import LLAMA_8B, SMALL
from bench.gpu.part import Part
from bench.gpu.served import served
from bench.support.servers import MODEL
from tests.support.noise_model import ensure_noise_model, write_dummy_model

CONFIGURATIONS = {"cluster": ("--prefill", "1", "--decode", "1"), "one engine": ("--workers", "1")}
RATES = (4, 16, 32)
LOAD_LIMIT_S = 20


def load(port: int, rate: int, input_len: int, run_time_s: int, scratch: Path) -> dict[str, Any]:
    """Returns locust's figures. Raises RuntimeError with its output."""
    (figures := scratch / "figures.json").unlink(missing_ok=True)
    command = [
        sys.executable, "-m", "locust", "-f", str(Path(__file__).parents[1] / "locustfile.py"), "--headless",
        "--users", "1", "--host", f"http://127.0.0.1:{port}", "--model", MODEL, "--request-rate", str(rate),
        "--run-time", f"{run_time_s}s", "--stop-timeout", "10", "--input-len", str(input_len), "--output-len", "32",
        "--figures", str(figures),
    ]  # fmt: skip
    done = subprocess.run(command, timeout=LOAD_LIMIT_S, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if not figures.is_file():
        raise RuntimeError(f"locust ended with status {done.returncode}: {done.stdout[-1500:]}")
    found: dict[str, Any] = json.loads(figures.read_text())["figures"]
    return found


def main() -> None:
    part = Part("cluster", __doc__)
    is_tiny = part.device == "cpu"
    flags = ["--load-format", "dummy", "--max-model-len", "2048"]
    if not is_tiny:
        flags += ["--dtype", "bfloat16", "--kv-cache-gib", "8", "--max-num-seqs", "64"]
    with tempfile.TemporaryDirectory() as folder:
        shape = LLAMA_8B if not (part.quick or is_tiny) else SMALL
        model = ensure_noise_model() if is_tiny else write_dummy_model(Path(folder), **shape)
        for name, roles in CONFIGURATIONS.items():
            with part.case(f"{name} starts and ends"), served(part, model, *roles, *flags) as port:
                for rate in (2,) if is_tiny else RATES:
                    with part.case(f"{name}, {rate}/s"):
                        figures = load(port, rate, 64 if is_tiny else 1024, 2 if is_tiny else 4, Path(folder))
                        part.add(f"{name}, {rate}/s", figures)
                        assert figures["num_completed"], figures["errors"]
    part.end()


if __name__ == "__main__":
    main()
