"""Order of work on the device in seeded schedules. `tests.simulation.stream_world` lists the invariants.

The mutations remove one wait, or put one call back on the event loop, and the schedules must notice. What they meet too
rarely is in `tests/unit/kv_transfer/test_nccl_group.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import BroadcastOptions

from tandem.engine import model_runner
from tandem.kv_transfer.connectors import nccl_group
from tandem.kv_transfer.connectors.cuda_ipc import CudaIpcSender
from tandem.kv_transfer.connectors.cuda_stream import SideStream
from tandem.kv_transfer.connectors.nccl_group import NcclGroup
from tandem.kv_transfer.connectors.process_group import ProcessGroupReceiver
from tests.simulation.stream_world import run, run_graphs
from tests.support.late_device import LateEvent, LateStream
from tests.support.late_nccl import LateNCCL

KINDS = ("ipc", "nccl", "graphs")


def run_one(kind: str, seed: int) -> int:
    """Returns how many prompts were decoded from blocks that had been transferred."""
    with pytest.MonkeyPatch.context() as patch:
        if kind == "graphs":
            run_graphs(seed, patch)
            return 0
        return run(seed, kind, patch).num_computed


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "seeds",
    [
        range(100),
        pytest.param(range(100, 300), marks=pytest.mark.extended),
        pytest.param(range(300, 3634), marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_schedules(kind: str, seeds: range) -> None:
    """10,000 in all."""
    num_computed = sum(run_one(kind, seed) for seed in seeds)
    assert num_computed > 2 * len(seeds) or kind == "graphs", "most transfers should succeed"


def test_few_modules_use_streams_and_events() -> None:
    """Each of them is under test here, or asks only whether the device still works (`device_errors`)."""
    root = Path(__file__).parents[2]
    uses = re.compile(r"torch\.cuda\.(Stream|Event|CUDAGraph|stream|graph|current_stream|default_stream|synchronize)\b")
    files = [
        file
        for folder in ("engine", "kv_transfer", "handover", "worker", "runtime")
        for file in (root / folder).rglob("*.py")
    ]
    found = {str(file.relative_to(root)) for file in files if uses.search(file.read_text())}
    others = {f"engine/{name}.py" for name in ("model_runner", "device_errors", "kv_cache/kv_cache_size")}
    others.add("kv_transfer/connectors/cuda_stream.py")
    assert {name for name in found if not name.startswith("engine/cuda/")} <= others


# ---- mutations


def no_wait_at_the_end_of_a_step(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(model_runner, "end_of_work", lambda device: lambda: None)


def a_transfer_ends_before_its_copies(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LateEvent, "synchronize", _only_steps_wait(LateEvent.synchronize))


def _only_steps_wait(synchronize: Callable[[LateEvent], None]) -> Callable[[LateEvent], None]:
    def mutated(event: LateEvent) -> None:
        actor = event._device.actor()
        if actor is None or not actor.name.startswith(("ship", "take")):
            synchronize(event)

    return mutated


def a_message_counts_at_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SideStream, "wait", lambda self, mark, timeout_s: None)


def a_message_begins_before_its_blocks_are_gathered(patch: pytest.MonkeyPatch) -> None:
    """As it could in a stream of torch's pool that does not wait for the side stream."""

    def broadcast(self: LateNCCL, tensors: list[torch.Tensor], options: Any) -> None:
        self._start(tensors[0], self.rank == options.rootRank, self.stream)

    patch.setattr(LateNCCL, "broadcast", broadcast)


def an_aborted_message_counts_as_arrived(patch: pytest.MonkeyPatch) -> None:
    def wait(self: Any, end: Any, timeout_s: float) -> None:
        self._side_stream.wait(end, timeout_s)

    patch.setattr(NcclGroup, "_await", wait)


def no_abort_after_an_error(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(NcclGroup, "move", NcclGroup._queue)
    patch.setattr(LateEvent, "synchronize", _only_steps_wait(LateEvent.synchronize))


def the_capture_does_not_wait_for_its_warm_up(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LateStream, "wait_stream", lambda self, other: None)


def peers_pools_are_mapped_on_the_loop(patch: pytest.MonkeyPatch) -> None:
    make = CudaIpcSender.__init__

    def mutated(self: Any, *arguments: Any) -> None:
        from tandem.kv_transfer.connectors import cuda_ipc

        cuda_ipc.map_peer_pool(arguments[2], torch.device("cpu"))
        make(self, *arguments)

    patch.setattr(CudaIpcSender, "__init__", mutated)


def groups_are_aborted_on_the_loop(patch: pytest.MonkeyPatch) -> None:
    def abort(group: Any, then: Callable[[], None] = lambda: None) -> None:
        if group is not None:
            group.abort()
        then()

    patch.setattr(nccl_group, "_abort_apart", abort)


def groups_connect_on_the_loop(patch: pytest.MonkeyPatch) -> None:
    make = ProcessGroupReceiver.__init__

    def mutated(self: Any, *arguments: Any) -> None:
        make(self, *arguments)
        group = nccl_group._new_group("path", 1)  # type: ignore[arg-type]
        group.broadcast([torch.zeros(1)], BroadcastOptions())

    patch.setattr(ProcessGroupReceiver, "__init__", mutated)


def the_watchdog_is_on(patch: pytest.MonkeyPatch) -> None:
    """As torch has it, with a group's time-out that is ours."""
    patch.setattr(nccl_group, "NCCL_ENVIRONMENT", {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"})
    patch.setattr(nccl_group, "NCCL_GROUP_TIMEOUT", timedelta(seconds=nccl_group.TRANSFER_TIMEOUT_S - 1))


@pytest.mark.parametrize(
    ("kind", "mutation"),
    [
        ("ipc", no_wait_at_the_end_of_a_step),
        ("nccl", no_wait_at_the_end_of_a_step),
        ("graphs", no_wait_at_the_end_of_a_step),
        ("ipc", a_transfer_ends_before_its_copies),
        ("nccl", a_message_counts_at_once),
        ("nccl", a_message_begins_before_its_blocks_are_gathered),
        ("nccl", an_aborted_message_counts_as_arrived),
        ("nccl", no_abort_after_an_error),
        ("graphs", the_capture_does_not_wait_for_its_warm_up),
        ("ipc", peers_pools_are_mapped_on_the_loop),
        ("nccl", groups_are_aborted_on_the_loop),
        ("nccl", groups_connect_on_the_loop),
        ("nccl", the_watchdog_is_on),
    ],
)
def test_a_removed_wait_is_noticed(
    kind: str, mutation: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutation(monkeypatch)
    for seed in range(2000):
        try:
            run_one(kind, seed)
        except Exception as violation:
            print(f"noticed by seed {seed}: {type(violation).__name__}: {str(violation).splitlines()[:1]}")
            return
    pytest.fail("2000 schedules passed without this wait")
