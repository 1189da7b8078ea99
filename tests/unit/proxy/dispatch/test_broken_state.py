"""What a broken assertion about one sequence costs: that sequence, and no other.

The states are broken by hand, because no message is known that breaks them.
"""

from __future__ import annotations

import logging

import pytest

from tandem.protocol.messages.dispatch import DecodeReserved, NewToken, TokenBatch
from tandem.protocol.messages.sampling import SampledToken, SamplingParams
from tandem.proxy.dispatch.sequence import DispatchedSequence
from tandem.runtime.errors import InternalError
from tests.support.proxy_cluster import DECODE, PREFILL, Cluster, play, played


def tokens_of(cluster: Cluster, sequence: DispatchedSequence) -> list[int]:
    delta = cluster.dispatcher.take(sequence)
    return [] if delta is None else [token.token_id for token in delta.tokens]


def test_a_broken_attempt_leaves_the_other_tokens_of_its_message(caplog: pytest.LogCaptureFixture) -> None:
    async def test(cluster: Cluster) -> None:
        [broken] = cluster.start([SamplingParams()], 5, 60)
        [whole] = cluster.start([SamplingParams()], 5, 60)
        attempt_ids = [cluster.started(0), cluster.started(1)]
        for attempt_id in attempt_ids:
            cluster.first(attempt_id, 5)
            cluster.dispatcher.on_message(DECODE, DecodeReserved(attempt_id))
        assert (tokens_of(cluster, broken), tokens_of(cluster, whole)) == ([5], [5])
        assert broken.attempt is not None
        broken.attempt._first_released, broken.attempt._num_decoded = False, 3
        batch = TokenBatch([NewToken(each, SampledToken(6), None) for each in attempt_ids])
        cluster.dispatcher.on_message(DECODE, batch)
        cluster.dispatcher.on_message(DECODE, batch)
        assert tokens_of(cluster, whole) == [6, 6]
        with pytest.raises(InternalError):
            for _ in range(3):  # its tokens, the end of its attempt, its error
                cluster.dispatcher.take(broken)
        assert broken.num_lost == 0, "another attempt might show wrong tokens"
        cluster.dispatcher.drop(broken)
        cluster.dispatcher.drop(whole)
        assert cluster.aborted().count("decode-0") == 2

    with caplog.at_level(logging.ERROR):
        play(test)
    assert "its state is wrong" in caplog.text


@played(worker_wait_s=30, workers=())
async def test_a_broken_prompt_leaves_the_others_that_wait_for_a_worker(cluster: Cluster) -> None:
    [broken] = cluster.start([SamplingParams()], 5, 60)
    [whole] = cluster.start([SamplingParams()], 5, 60)
    broken.generated = [1] * 5  # nothing is left to generate
    cluster.join(PREFILL, DECODE)
    assert isinstance(broken.error, InternalError) and broken.attempt is None
    assert whole.error is None and whole.attempt is not None
    cluster.dispatcher.drop(broken)
    cluster.dispatcher.drop(whole)


@played()
async def test_a_wrong_count_ends_the_sequence_and_tells_its_workers(cluster: Cluster) -> None:
    [sequence] = cluster.start([SamplingParams()], 5, 60)
    attempt = sequence.attempt
    assert attempt is not None
    cluster.router.sequence_ended(attempt.route)  # once too often
    cluster.dispatcher.drop(sequence)
    assert cluster.aborted() == ["decode-0", "prefill-0"] and cluster.dispatcher.num_running == 0
    assert attempt.route.decode_use is not None
    attempt.route.decode_use._num_own += 1
