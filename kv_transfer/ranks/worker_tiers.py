"""The tiers of all ranks of a worker: each job runs on rank 0 and on every follower, over their own heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from tandem.kv_transfer.connector import gather
from tandem.kv_transfer.tiers.tier import OnAnswer, TierAnswer
from tandem.runtime.errors import KVTransferFailed

if TYPE_CHECKING:  # they load torch, which the simulator has not
    from tandem.kv_transfer.ranks.remote_rank import RemoteRank
    from tandem.kv_transfer.tiers.tier_thread import TierThread


class WorkerTiers:
    """The tiers of all ranks, as rank 0 uses them. own: rank 0's by name, fastest first. followers: the other ranks.

    No method blocks. `on_answer` is called once, on any thread, when all ranks have answered: with the blocks that all
    of them have, the first error, and rank 0's figures and changes. A block of which a rank lacks its heads is missing.
    """

    def __init__(self, own: Mapping[str, TierThread], followers: Sequence[RemoteRank] = ()) -> None:
        self._own = own
        self._followers = followers

    @property
    def names(self) -> list[str]:
        return list(self._own)

    def store(self, name: str, block_ids: list[int], hashes: list[bytes], on_answer: OnAnswer) -> None:
        self._own[name].store(block_ids, hashes, self._order("store", name, block_ids, hashes, on_answer=on_answer))

    def load(self, name: str, block_ids: list[int], hashes: list[bytes], on_answer: OnAnswer) -> None:
        """See `TierThread.load`."""
        self._own[name].load(block_ids, hashes, self._order("load", name, block_ids, hashes, on_answer=on_answer))

    def find(self, name: str, hashes: list[bytes], on_answer: OnAnswer) -> None:
        """Finds rank 0's heads only; the other ranks' were stored with them."""
        self._own[name].find(hashes, on_answer)

    def refresh(self, name: str, on_answer: OnAnswer) -> None:
        self._own[name].refresh(self._order("refresh", name, on_answer=on_answer))

    def clear(self, name: str, on_answer: OnAnswer) -> None:
        self._own[name].clear(self._order("clear", name, on_answer=on_answer))

    def close(self) -> None:
        """Closes rank 0's tiers. Followers end with rank 0."""
        for tier in self._own.values():
            tier.close()

    def _order(self, order: str, *args: Any, on_answer: OnAnswer) -> OnAnswer:
        """Sends the order to the followers. Returns the callback for rank 0's own answer."""

        def merge(answers: list[TierAnswer] | KVTransferFailed) -> None:
            assert isinstance(answers, list)  # a failure is a TierAnswer
            num_blocks = min(answer.num_blocks for answer in answers)
            error = next((answer.error for answer in answers if answer.error is not None), None)
            on_answer(replace(answers[0], num_blocks=num_blocks, error=error))

        def follower_done(done: OnAnswer, result: Any) -> None:
            done(TierAnswer(error=result.message) if isinstance(result, KVTransferFailed) else TierAnswer(*result))

        own_done, *others_done = gather(1 + len(self._followers), merge)
        for follower, done in zip(self._followers, others_done, strict=True):
            follower.order(order, *args, on_done=partial(follower_done, done))
        return own_done
