"""Messages of workers in every order, and with figures that cannot be true. The cases are in `scripts/`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.protocol.messages.dispatch import DecodeBegan, FirstToken, NewToken, TokenBatch
from tandem.protocol.messages.sampling import SampledToken, SamplingParams
from tests.support.proxy_cluster import DECODE, PREFILL, Cluster, collect, played, turn


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


@given(st.lists(st.booleans(), min_size=8, max_size=8), st.lists(st.booleans(), min_size=8, max_size=8))
@played()
async def test_every_interleaving_gives_the_same_tokens(
    cluster: Cluster, prefill_turns: list[bool], reader_turns: list[bool]
) -> None:
    """The messages of one worker keep their order. The order between the workers and the reader is arbitrary."""
    reader = asyncio.create_task(collect(cluster.generate()))
    await turn()
    attempt_id = cluster.started()
    from_prefill = [lambda: cluster.first(attempt_id, 10)]
    from_decode: list[Callable[[], None]] = [lambda: cluster.reserved(attempt_id)]
    for token_id in (11, 12, 13):
        from_decode.append(lambda token_id=token_id: cluster.token(attempt_id, token_id))
    from_decode.append(lambda: cluster.token(attempt_id, 14, "length"))
    for prefill_first, reader_runs in zip(prefill_turns, reader_turns, strict=True):
        source = from_prefill if (prefill_first and from_prefill) or not from_decode else from_decode
        if source:
            source.pop(0)()
        if reader_runs:
            await turn()
    for event in from_prefill + from_decode:
        event()
    assert await reader == ([10, 11, 12, 13, 14], "length")
    assert cluster.aborted() == []
