"""A message over the size limit is never sent: its request fails with one error, and the connection stays open."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.protocol.codec import MAX_MESSAGE_BYTES, Codec, MessageTooLarge
from tandem.protocol.messages.dispatch import (
    AbortAttempt,
    AttemptFailed,
    DecodeReserved,
    FirstToken,
    StartPrefill,
    ToProxy,
    ToWorker,
)
from tandem.protocol.messages.packed import max_packed_bytes, pack_logprobs, unpack_logprobs
from tandem.protocol.messages.sampling import SampledToken, SamplingParams, TokenLogprobs
from tandem.protocol.sockets import DealerSocket, RouterSocket, new_context
from tandem.runtime.errors import InvalidRequest
from tandem.worker.serving_worker import send_to_proxy
from tests.support.proxy_cluster import PREFILL, Cluster, play, turn

TOO_LARGE = [bytes(MAX_MESSAGE_BYTES)]


def test_a_first_token_over_the_limit_fails_its_attempt_and_leaves_the_connection_open(tmp_path: Path) -> None:
    async def run() -> list[Any]:
        context = new_context()
        has_connected, received, broken = asyncio.Event(), asyncio.Queue[Any](), []

        def on_hello(identity: bytes, message: Any) -> None:
            assert identity == b"proxy:0"
            has_connected.set()

        worker = RouterSocket(context, f"ipc://{tmp_path}/worker", Codec(ToWorker), on_hello)
        proxy = DealerSocket(
            context,
            worker.endpoint,
            Codec(ToProxy),
            received.put_nowait,
            b"proxy:0",
            on_broken=lambda: broken.append(1),
        )
        try:
            hello = AbortAttempt("proxy", "a")
            assert proxy.send(hello)
            await asyncio.wait_for(has_connected.wait(), 10)
            first = FirstToken("a", SampledToken(1), None, 0.0, 0.0, TOO_LARGE)
            send_to_proxy(worker, "proxy", first)
            send_to_proxy(worker, "proxy", DecodeReserved("b"))
            messages = [await asyncio.wait_for(received.get(), 10) for _ in range(2)]
            assert not broken
            return messages
        finally:
            worker.close()
            proxy.close()
            context.destroy(linger=0)

    failed, following = asyncio.run(run())
    assert isinstance(failed, AttemptFailed) and failed.attempt_id == "a" and following == DecodeReserved("b")
    assert isinstance(failed.error.to_error(), InvalidRequest) and "the limit is" in failed.error.message


def test_a_prompt_that_fits_no_message_fails_once_and_is_not_tried_again() -> None:
    async def test(cluster: Cluster) -> None:
        def refuse(worker: Any, message: Any) -> bool:
            cluster.pool.sent.append((worker.worker_id, message))
            if isinstance(message, StartPrefill):
                raise MessageTooLarge("too large")
            return True

        cluster.pool.send = refuse  # type: ignore[method-assign]
        [sequence] = cluster.start([SamplingParams()], 10, 60)
        with pytest.raises(InvalidRequest, match="too large"):
            await cluster.next_tokens(sequence)
        await turn()
        assert len(cluster.pool.of(StartPrefill)) == 1
        cluster.dispatcher.drop(sequence)

    play(test)


def test_an_attempt_that_fails_for_its_size_is_not_tried_again() -> None:
    async def test(cluster: Cluster) -> None:
        [sequence] = cluster.start([SamplingParams()], 10, 60)
        cluster.failed(PREFILL, cluster.started(), MessageTooLarge("too large"))
        with pytest.raises(InvalidRequest, match="too large"):
            await cluster.next_tokens(sequence)
        assert len(cluster.pool.of(StartPrefill)) == 1
        cluster.dispatcher.drop(sequence)

    play(test)


floats = st.floats(allow_nan=False)
entries = st.tuples(st.integers(0, 2**31 - 1), floats)


@given(data=st.data(), num_top=st.integers(0, 20), num_tokens=st.integers(0, 150))
def test_packed_logprobs_are_the_same_and_within_the_computed_size(
    data: st.DataObject, num_top: int, num_tokens: int
) -> None:
    one = st.builds(
        TokenLogprobs, floats, st.integers(1, 2**31 - 1), st.lists(entries, min_size=num_top, max_size=num_top)
    )
    some = data.draw(st.lists(one, min_size=1, max_size=4))
    logprobs = (some * num_tokens)[:num_tokens]
    pieces = pack_logprobs(logprobs)
    assert [each for piece in pieces for each in unpack_logprobs(piece)] == logprobs
    assert sum(map(len, pieces)) <= max_packed_bytes(num_tokens, num_top)
    assert all(len(piece) < 40_000 for piece in pieces)
