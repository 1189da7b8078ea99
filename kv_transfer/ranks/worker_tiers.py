"""The tiers of all ranks of a worker: each job runs on rank 0 and on every follower, over their own heads."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from tandem.kv_transfer.connector import gather
from tandem.kv_transfer.tiers.tier import OnAnswer, TierAnswer, TiersConfig
from tandem.runtime.errors import KVTransferFailed

if TYPE_CHECKING:  # loads torch, which the simulator has not
    from tandem.kv_transfer.tiers.tier_thread import TierThread


log = logging.getLogger(__name__)


class TierFollower(Protocol):
    """A rank other than rank 0, which does the same to its own tiers. Implemented by `remote_rank.RemoteRank`."""

    def order(self, name: str, *args: Any, on_done: Callable[[Any], None] = ...) -> None:
        """Sends an order of `remote_rank.TransferServer`. `on_done` gets its result, or a KVTransferFailed, once."""


class WorkerTiers:
    """The tiers of all ranks, as rank 0 uses them. own: rank 0's by name, fastest first. followers: the other ranks.

    No method blocks. `on_answer` is called once, on any thread, when all ranks have answered: with the blocks that all
    of them have, the first error, and rank 0's figures and changes. A block of which a rank lacks its heads is missing.
    The answers of a tier come in the order of the questions, because each has only what has changed since the last one.
    """

    def __init__(self, own: Mapping[str, TierThread], followers: Sequence[TierFollower] = ()) -> None:
        self._own = own
        self._followers = followers
        self._answers = {name: _AnswersInOrder() for name in own}

    @classmethod
    def of(cls, own: Mapping[str, TierThread], followers: Sequence[TierFollower], config: TiersConfig) -> WorkerTiers:
        """Returns the tiers of all ranks. config: what rank 0's were made from, and its followers make theirs from."""
        tiers = cls(own, followers)
        for follower in followers if tiers.names else ():
            follower.order("use_tiers", config)
        return tiers

    @property
    def names(self) -> list[str]:
        return list(self._own)

    def store(self, name: str, block_ids: list[int], hashes: list[bytes], on_answer: OnAnswer) -> None:
        on_answer = self._answers[name].ask(on_answer)
        self._own[name].store(block_ids, hashes, self._order("store", name, block_ids, hashes, on_answer=on_answer))

    def load(self, name: str, block_ids: list[int], hashes: list[bytes], on_answer: OnAnswer) -> None:
        """See `TierThread.load`."""
        on_answer = self._answers[name].ask(on_answer)
        self._own[name].load(block_ids, hashes, self._order("load", name, block_ids, hashes, on_answer=on_answer))

    def find(self, name: str, hashes: list[bytes], on_answer: OnAnswer) -> None:
        """Finds rank 0's heads only; the other ranks' were stored with them."""
        self._own[name].find(hashes, self._answers[name].ask(on_answer))

    def refresh(self, name: str, on_answer: OnAnswer) -> None:
        self._own[name].refresh(self._order("refresh", name, on_answer=self._answers[name].ask(on_answer)))

    def clear(self, name: str, on_answer: OnAnswer) -> None:
        self._own[name].clear(self._order("clear", name, on_answer=self._answers[name].ask(on_answer)))

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


@dataclass(slots=True, eq=False)
class _Question:
    """answer: None until it is known."""

    on_answer: OnAnswer
    answer: TierAnswer | None = None


class _AnswersInOrder:
    """Passes on the answers of one tier in the order of the questions, whichever thread knows them first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._questions: deque[_Question] = deque()
        self._is_passing_on = False  # by one thread at a time, without the lock: a callback may ask again

    def ask(self, on_answer: OnAnswer) -> OnAnswer:
        """Returns the callback for the answer to the next question."""
        question = _Question(on_answer)
        with self._lock:
            self._questions.append(question)
        return partial(self._on_answer, question)

    def _on_answer(self, question: _Question, answer: TierAnswer) -> None:
        with self._lock:
            question.answer = answer
            if self._is_passing_on:  # that thread finds it
                return
            self._is_passing_on = True
        while (known := self._next()) is not None:
            on_answer, answer = known
            try:
                on_answer(answer)
            except Exception:  # the answers to other questions follow
                log.exception("the answer of a tier could not be handled")

    def _next(self) -> tuple[OnAnswer, TierAnswer] | None:
        """Removes the oldest question and returns its answer; None while that is not known."""
        with self._lock:
            if self._questions and (answer := self._questions[0].answer) is not None:
                return self._questions.popleft().on_answer, answer
            self._is_passing_on = False
            return None
