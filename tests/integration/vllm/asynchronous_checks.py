"""Does the checks of sequences with asynchronous scheduling, as vLLM schedules on GPUs: `python FILE MODEL ANSWER`.

Runs in vLLM's interpreter. vLLM turns asynchronous scheduling off on CPUs. Here it is on, and the CUDA streams and
events that its model runner then uses do nothing: each step has ended when it returns. So scheduler, batch queue and
deferred frees are those of GPUs; that copies overlap with steps is not tried.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.worker import cpu_model_runner


class _NoEvent:
    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...


class _NoStream:
    device = torch.device("cpu")

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, *_: Any) -> None: ...


@contextmanager
def _nothing(*_: Any) -> Iterator[None]:
    yield


def schedule_asynchronously() -> None:
    """Call before the engine is made."""
    make = EngineArgs.create_engine_config

    def create(arguments: EngineArgs, *given: Any, **named: Any) -> VllmConfig:
        config = make(arguments, *given, **named)
        config.scheduler_config.async_scheduling = True
        return config

    EngineArgs.create_engine_config = create
    cpu_model_runner._torch_cuda_wrapper = _nothing  # would take the doubles away after the start
    doubles: dict[str, Any] = {"Event": _NoEvent, "Stream": _NoStream, "stream": _nothing}
    for name, double in {**doubles, "current_stream": _NoStream}.items():
        setattr(torch.cuda, name, double)
    torch.Event = _NoEvent  # type: ignore[assignment]


def main() -> None:
    schedule_asynchronously()

    import engine_checks  # type: ignore[import-not-found]
    from engine_driver import EngineDriver  # type: ignore[import-not-found]

    driver = EngineDriver(sys.argv[1])
    core = driver.engine._core
    answer = {
        "scheduler": type(core.scheduler).__name__,
        "batches_at_once": core.batch_queue.maxlen,
        "frees_are_deferred": core.scheduler.defer_block_free,
        "resumed": engine_checks.resumed(driver),
        "moved": engine_checks.moved(driver),
        "aborts": engine_checks.aborts(driver),
        "skipped": engine_checks.skipped(driver),
    }
    driver.engine.stop(10.0)
    Path(sys.argv[2]).write_text(json.dumps(answer))
    os._exit(0)  # vLLM's own end takes seconds


if __name__ == "__main__":
    main()
