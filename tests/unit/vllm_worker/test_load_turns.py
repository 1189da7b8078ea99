"""Workers that share a GPU load one after another, whatever happens to them."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tandem.vllm_worker.load_turns import turn_to_load

HOLD = """
import asyncio, sys
from tandem.vllm_worker.load_turns import turn_to_load
async def hold():
    async with turn_to_load([sys.argv[1]]):
        print("loading", flush=True)
        await asyncio.Event().wait()
asyncio.run(hold())
"""


async def take_turn(file: str, load: Callable[[], int] = lambda: 0) -> int:
    async with turn_to_load([file]):
        return load()


async def test_workers_that_share_a_gpu_load_one_after_another(tmp_path: Path) -> None:
    files = {gpu: str(tmp_path / gpu) for gpu in "abc"}
    loading: set[str] = set()
    seen: list[set[str]] = []

    async def load(gpus: str) -> None:
        async with turn_to_load([files[gpu] for gpu in gpus]):
            assert not loading & set(gpus), "another worker loads on one of these GPUs"
            loading.update(gpus)
            seen.append(set(loading))
            await asyncio.sleep(0)
            loading.difference_update(gpus)

    await asyncio.gather(*map(load, ("ab", "ba", "c", "bc", "a")))
    assert len(seen) == 5 and not loading
    assert {"a", "b", "c"} in seen, "workers on other GPUs do not wait"


def test_a_worker_that_is_killed_holds_no_turn(tmp_path: Path) -> None:
    file = str(tmp_path / "gpu")
    with subprocess.Popen([sys.executable, "-c", HOLD, file], stdout=subprocess.PIPE) as worker:
        assert worker.stdout is not None and worker.stdout.readline() == b"loading\n"
        worker.kill()
    asyncio.run(take_turn(file))


def test_ranks_that_were_forked_while_the_model_loaded_hold_no_turn(tmp_path: Path) -> None:
    def fork_rank() -> int:
        rank = os.fork()
        if not rank:
            signal.pause()
            os._exit(0)
        return rank

    file = str(tmp_path / "gpu")
    rank = asyncio.run(take_turn(file, fork_rank))
    try:
        asyncio.run(take_turn(file))
    finally:
        os.kill(rank, signal.SIGKILL)
        os.waitpid(rank, 0)
