"""Each dispatch records where its sequences run and what the router predicted for them."""

from __future__ import annotations

import pytest

from tandem.protocol.messages.membership import Role, WorkerInfo, WorkerLoad, WorkerStatus
from tandem.protocol.messages.sampling import SamplingParams
from tests.support.proxy_cluster import DECODE, PREFILL, Cluster, play

ANY = WorkerInfo("worker-0", "w1", "any", "ipc://w", 3)


@pytest.mark.parametrize(
    ("workers", "threshold", "max_tokens", "expected"),
    [
        ((PREFILL, DECODE), 0, 4, ("two", "prefill-0", "decode-0", True)),
        ((PREFILL, DECODE), 0, 1, ("prefill_only", "prefill-0", "", False)),
        ((PREFILL, DECODE), 8, 4, ("deflected", "decode-0", "decode-0", False)),
        ((ANY,), 0, 4, ("same", "worker-0", "worker-0", False)),
    ],
)
def test_a_dispatch_records_where_it_runs(
    workers: tuple[WorkerInfo, ...], threshold: int, max_tokens: int, expected: tuple[str, str, str, bool]
) -> None:
    async def test(cluster: Cluster) -> None:
        [sequence] = cluster.start([SamplingParams()], max_tokens, deadline_s=60)
        [times] = sequence.times
        assert (times.placement, times.prefill, times.decode, times.is_shipped) == expected
        assert times.predicted_ttft_s > 0
        cluster.dispatcher.drop(sequence)

    play(test, threshold=threshold, workers=workers)


@pytest.mark.parametrize(("role", "expected"), [("decode", "deflected"), ("any", "same")])
def test_the_current_role_counts_not_that_at_registration(role: Role, expected: str) -> None:
    async def test(cluster: Cluster) -> None:
        load = WorkerLoad(fixed_step_s=0.02)
        cluster.worker_table.on_status(0.1, WorkerStatus(ANY.worker_id, ANY.epoch, role, load))
        [sequence] = cluster.start([SamplingParams()], 4, deadline_s=60)
        [times] = sequence.times
        assert times.placement == expected
        assert times.predicted_itl_s == 0.02
        cluster.dispatcher.drop(sequence)

    play(test, threshold=8, workers=(ANY,))
