"""Measures how long a cluster needs to start, and to replace a killed worker: `python -m bench.startup`.

From the command to the first 200 of /health, and from SIGKILL of a worker until all pairs are ready again: preloaded,
as a cluster does it, and cold, when its preloaded process was killed too. Wall time, and CPU time of the whole cluster.
Two models: the demo, and one with a checkpoint of 1 GB (--checkpoint-gb), whose random weights are written first.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil

from bench.support.report import Aim, Report, finish, new_parser, print_rows
from bench.support.servers import tandem as tandem_command
from tandem.deploy.demo_model import DEMO_MODEL
from tandem.deploy.operations.cluster_client import ClusterClient
from tandem.deploy.processes.supervisor import STABLE_AFTER_S
from tandem.protocol.messages.membership import StatusReport
from tests.support.ports import free_port
from tests.support.processes import family_cpu_s

TIMEOUT_S = 120.0
POLL_S = 0.02
LAYOUTS: dict[str, tuple[str, ...]] = {
    "prefill/decode": (),
    "--workers 2": ("--workers", "2"),
    "tensor parallel 2": ("--tensor-parallel-size", "2"),
}
AIMS_S = {"start": 6.0, "killed, preloaded": 1.5}
"""Of the demo model, on two free cores."""
MAX_FOLLOWERS_S = 0.5
"""What followers may add to the time of the demo, on two free cores."""
MAX_BEYOND_LOADING_S = 1.0
"""What a killed worker with a large checkpoint may need besides the time that `write_checkpoint` returns."""
_LAYER_BYTES = 90 << 20


def write_checkpoint(folder: Path, num_bytes: int) -> float:
    """Writes a Llama of that size with random bfloat16 weights.

    Returns the seconds in which this process loads it, packs its weights and fuses its layers, as a worker does.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from tandem.engine.cuda.step_graphs import GraphLimits
    from tandem.engine.engine_config import EngineConfig
    from tandem.engine.kv_cache.kv_pool import KVPool
    from tandem.engine.loading.model_loader import load_model
    from tandem.engine.model_runner import ModelRunner

    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_MODEL / file, folder)
    config = LlamaConfig(
        vocab_size=LlamaConfig.from_pretrained(DEMO_MODEL).vocab_size, hidden_size=2048, intermediate_size=5632,
        num_hidden_layers=max(1, num_bytes // _LAYER_BYTES), num_attention_heads=16, num_key_value_heads=4,
        head_dim=128, tie_word_embeddings=True,
    )  # fmt: skip
    torch.set_default_dtype(torch.bfloat16)
    LlamaForCausalLM(config).save_pretrained(folder)
    torch.set_default_dtype(torch.float32)
    torch.set_num_threads(1)  # as a worker of two on two cores
    engine = EngineConfig(model=str(folder), device="cpu", kv_cache_bytes=64 << 20)
    began_at = time.monotonic()
    loaded = load_model(engine)
    ModelRunner(loaded, KVPool(loaded, engine), GraphLimits.of(engine))
    return time.monotonic() - began_at


def until(condition: Callable[[], bool]) -> float:
    """Returns the seconds until the condition holds. Raises TimeoutError."""
    began_at = time.monotonic()
    while not condition():
        if time.monotonic() > began_at + TIMEOUT_S:
            raise TimeoutError("the cluster is not ready in time")
        time.sleep(POLL_S)
    return time.monotonic() - began_at


def measure(model: Path, layout: tuple[str, ...], num_kills: int) -> dict[str, tuple[float, float]]:
    """Returns wall and CPU seconds of each case; of kills, the slowest."""
    port = free_port()
    cluster = ClusterClient(port)
    command = tandem_command(model, port, "--admin-port", str(free_port()), *layout)
    began_at = time.monotonic()
    launcher = psutil.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until(lambda: is_healthy(port))
        found = {"start": (time.monotonic() - began_at, family_cpu_s(launcher.pid))}
        until(lambda: any(len(report.workers) == 2 for report in reports(cluster)))
        for case in ("killed, preloaded", "killed, cold"):
            found[case] = max(kill(cluster, launcher.pid, case) for _ in range(num_kills))
        return found
    finally:
        launcher.send_signal(signal.SIGTERM)
        launcher.wait(60)


def kill(cluster: ClusterClient, launcher_pid: int, case: str) -> tuple[float, float]:
    """Kills the first worker and returns wall and CPU seconds until the cluster is complete."""
    time.sleep(STABLE_AFTER_S + 1.0)  # restarts are not delayed then, and another preloaded process is ready
    before = reports(cluster)
    epochs, num_pairs = {each.worker.epoch for each in before[0].workers}, before[0].num_ready_pairs
    victim = min(before[0].workers, key=lambda each: each.worker.worker_id).worker
    killed = [victim.pid]
    if case == "killed, cold":
        killed += [child.pid for child in preloaded_processes(launcher_pid)]
    cpu_before_s = family_cpu_s(launcher_pid) - sum(map(family_cpu_s, killed))  # what has ended does not count later
    for pid in reversed(killed):
        os.kill(pid, signal.SIGKILL)

    def is_complete() -> bool:
        now = reports(cluster)
        workers = [each.worker for report in now for each in report.workers]
        if not now or victim.epoch in {worker.epoch for worker in workers}:
            return False
        return len(workers) == len(epochs) and now[0].num_ready_pairs >= num_pairs

    wall_s = until(is_complete)
    cpu_s = family_cpu_s(launcher_pid) - cpu_before_s
    until(lambda: bool(preloaded_processes(launcher_pid)))
    return wall_s, cpu_s


def preloaded_processes(launcher_pid: int) -> list[psutil.Process]:
    return [child for child in psutil.Process(launcher_pid).children() if "tandem.worker.preload" in child.cmdline()]


def reports(cluster: ClusterClient) -> list[StatusReport]:
    try:
        return asyncio.run(cluster.status())
    except Exception:
        return []


def is_healthy(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--checkpoint-gb", type=float, default=1.0, help="size of the large model; 0: the demo only")
    options = parser.parse_args()
    figures: dict[str, dict[str, float]] = {}
    layouts = dict(list(LAYOUTS.items())[:1]) if options.quick else LAYOUTS
    with tempfile.TemporaryDirectory(prefix="tandem-startup-") as folder:
        models = {"demo": DEMO_MODEL}
        if options.checkpoint_gb:
            models["large"] = Path(folder)
            figures["large"] = {"loading: wall s": write_checkpoint(Path(folder), int(options.checkpoint_gb * 1e9))}
        for model, model_folder in models.items():
            for layout, flags in layouts.items():
                found = measure(model_folder, flags, 1 if options.quick else 2)
                figures[f"{model}, {layout}"] = {
                    f"{case}: {clock}": value
                    for case, times in found.items()
                    for clock, value in zip(("wall s", "CPU s"), times, strict=True)
                }
    print_rows([{"start of": name, **times} for name, times in figures.items()])
    finish(Report.of("startup", figures, aims_of(figures)), options.json)


def aims_of(figures: dict[str, dict[str, float]]) -> list[Aim]:
    case, first = "killed, preloaded: wall s", "prefill/decode"
    demo = figures[f"demo, {first}"]
    aims = [Aim.of(f"demo: {each} (wall s)", demo[f"{each}: wall s"], aim, "lower") for each, aim in AIMS_S.items()]
    if (ranks := figures.get("demo, tensor parallel 2")) is not None:
        added_s = ranks[case] - demo[case]
        aims.append(Aim.of("demo: added by followers, killed (wall s)", added_s, MAX_FOLLOWERS_S, "lower"))
    if (large := figures.get(f"large, {first}")) is not None:
        beyond_s = large[case] - figures["large"]["loading: wall s"]
        aims.append(Aim.of("large: beyond loading, killed (wall s)", beyond_s, MAX_BEYOND_LOADING_S, "lower"))
    return aims


if __name__ == "__main__":
    main()
