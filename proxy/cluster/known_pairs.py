"""Pairs that one worker has reported. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from tandem.protocol.messages.checks import MAX_PAIRS
from tandem.protocol.messages.membership import PairChanges, PairStatus, PairTraffic

MAX_REFUSED_PAIRS = 4


class KnownPairs:
    """Pairs by the decode worker's epoch, and the KV shipped through them."""

    def __init__(self) -> None:
        self._by_epoch: dict[str, PairStatus] = {}
        self._refused: dict[str, PairStatus] = {}  # those of `_by_epoch`
        self._traffic: dict[str, PairTraffic] = {}  # by the decode worker's name
        self._num_changes = 0
        self.has_missed = False
        """Whether the worker must report all pairs again."""

    def apply(self, update: PairChanges | None, num_changes: int) -> list[str]:
        """Takes what a report says of the pairs. Returns the epochs of decode workers whose pair has changed.

        num_changes: see WorkerStatus.num_pair_changes.
        """
        if update is None:
            self.has_missed = num_changes != self._num_changes
            return []
        if update.since not in (0, self._num_changes):
            self.has_missed = True
            return []
        self.has_missed, self._num_changes = False, num_changes
        reported = {pair.decode_epoch: pair for pair in update.changed}
        gone = update.gone if update.since else [epoch for epoch in self._by_epoch if epoch not in reported]
        changed = [epoch for epoch in gone if self._forget(epoch)]
        for epoch, pair in reported.items():
            if self._by_epoch.get(epoch) == pair:
                continue
            changed.append(epoch)
            self._by_epoch[epoch] = pair
            if pair.state == "refused":
                self._refused[epoch] = pair
            else:
                self._refused.pop(epoch, None)
        if len(self._by_epoch) > MAX_PAIRS:
            self.has_missed = True
            changed += [epoch for epoch in list(self._by_epoch) if self._forget(epoch)]
        return changed

    def _forget(self, epoch: str) -> bool:
        pair = self._by_epoch.pop(epoch, None)
        if pair is None:
            return False
        self._refused.pop(epoch, None)
        self._traffic.pop(pair.decode_worker_id, None)
        return True

    def add_traffic(self, traffic: Iterable[PairTraffic]) -> None:
        """Takes new totals of some pairs."""
        self._traffic.update((each.decode_worker_id, each) for each in traffic)
        if len(self._traffic) > MAX_PAIRS:
            self._traffic.clear()

    def is_ready(self, decode_epoch: str) -> bool:
        pair = self._by_epoch.get(decode_epoch)
        return pair is not None and pair.state == "ready"

    def all(self) -> list[PairStatus]:
        return list(self._by_epoch.values())

    def refused(self) -> list[PairStatus]:
        """Returns a refused pair for each reason, at most `MAX_REFUSED_PAIRS`."""
        return list({pair.reason: pair for pair in reversed(self._refused.values())}.values())[:MAX_REFUSED_PAIRS]

    def traffic(self) -> list[PairTraffic]:
        return list(self._traffic.values())
