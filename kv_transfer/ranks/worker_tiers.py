"""The tiers of all ranks of a worker: each job runs on rank 0 and on every follower, over their own heads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

from tandem.kv_transfer.ranks import orders
from tandem.kv_transfer.ranks.remote_rank import MakeOrder, RemoteRank
from tandem.kv_transfer.tiers.rank_tiers import RankTiers
from tandem.kv_transfer.tiers.tier import OnAnswer, TierAnswer


class WorkerTiers:
    """The tiers of all ranks, as rank 0 uses them. own: rank 0's. followers: the other ranks.

    No method blocks. `on_answer` is called once, on any thread, when all ranks have answered: with the blocks that all
    of them have, the first error, and rank 0's figures and changes. A block of which a rank lacks its heads is missing.
    """

    def __init__(self, own: RankTiers, followers: Sequence[RemoteRank] = ()) -> None:
        self._own = own
        self._followers = followers

    @property
    def names(self) -> list[str]:
        return self._own.names

    def store(self, name: str, block_ids: list[int], hashes: list[bytes], on_answer: OnAnswer) -> None:
        """See `RankTiers.store`."""
        done = self._ask(lambda job_id: orders.StoreInTier(job_id, name, block_ids, hashes), on_answer)
        self._own.store(name, block_ids, hashes, done)

    def load(self, name: str, block_ids: list[int], hashes: list[bytes], on_answer: OnAnswer) -> None:
        """See `RankTiers.load`."""
        done = self._ask(lambda job_id: orders.LoadFromTier(job_id, name, block_ids, hashes), on_answer)
        self._own.load(name, block_ids, hashes, done)

    def find(self, name: str, hashes: list[bytes], on_answer: OnAnswer) -> None:
        """Finds rank 0's heads only; the other ranks' were stored with them."""
        self._own.find(name, hashes, on_answer)

    def refresh(self, name: str, on_answer: OnAnswer) -> None:
        self._own.refresh(name, self._ask(lambda job_id: orders.RefreshTier(job_id, name), on_answer))

    def clear(self, name: str, on_answer: OnAnswer) -> None:
        self._own.clear(name, self._ask(lambda job_id: orders.ClearTier(job_id, name), on_answer))

    def close(self) -> None:
        """Closes rank 0's tiers. Followers end with rank 0."""
        self._own.close()

    def _ask(self, make: MakeOrder, on_answer: OnAnswer) -> OnAnswer:
        """Sends the order to the followers. Returns the callback for rank 0's own answer."""
        if not self._followers:
            return on_answer
        answers = _Answers(1 + len(self._followers), on_answer)
        for follower in self._followers:
            follower.use_tier(make, answers.of_follower)
        return answers.of_rank_0


class _Answers:
    """Merges the answers of all ranks, which arrive on any thread."""

    def __init__(self, num_left: int, on_answer: Callable[[TierAnswer], None]) -> None:
        self._lock = threading.Lock()
        self._num_left = num_left
        self._on_answer = on_answer
        self._own = TierAnswer()
        self._counts: list[int] = []
        self._errors: list[str] = []

    def of_rank_0(self, answer: TierAnswer) -> None:
        self._own = answer
        self.of_follower(answer.num_blocks, answer.error)

    def of_follower(self, num_blocks: int, error: str | None) -> None:
        with self._lock:
            self._counts.append(num_blocks)
            self._errors += [error] if error is not None else []
            self._num_left -= 1
            if self._num_left:
                return
        error = self._errors[0] if self._errors else None
        self._on_answer(replace(self._own, num_blocks=min(self._counts), error=error))
