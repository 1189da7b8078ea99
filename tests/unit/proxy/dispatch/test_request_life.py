"""Messages of workers with figures that cannot be true. `scripts/life.txt` has the orders in which messages come."""

from __future__ import annotations

import pytest

from tandem.protocol.messages.dispatch import DecodeBegan, FirstToken, NewToken, TokenBatch
from tandem.protocol.messages.sampling import SampledToken, SamplingParams
from tests.support.proxy_cluster import DECODE, PREFILL, Cluster, played


@pytest.mark.parametrize("num_cached_tokens", [-5, 10**9])
@played()
async def test_figures_that_cannot_be_true_fail_no_request(cluster: Cluster, num_cached_tokens: int) -> None:
    [sequence] = cluster.start([SamplingParams()], 2, 60)
    attempt_id, nan = cluster.started(), float("nan")
    first = FirstToken(attempt_id, SampledToken(5), None, nan, -1e300, num_cached_tokens=num_cached_tokens)
    cluster.dispatcher.on_message(PREFILL, first)
    last = NewToken(attempt_id, SampledToken(6), "length")
    cluster.dispatcher.on_message(DECODE, TokenBatch([last], [DecodeBegan(attempt_id, nan, float("inf"), -1)]))
    delta = cluster.dispatcher.take(sequence)
    assert delta is not None and 0 <= delta.num_cached_tokens <= sequence.prompt.num_tokens
    [times] = sequence.times
    assert times.queue_s == times.prefill_s == times.decode_wait_s == times.step_s == times.num_kv_bytes == 0
    cluster.dispatcher.drop(sequence)
