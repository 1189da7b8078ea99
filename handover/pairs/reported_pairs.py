"""What a worker has told the proxies of the pairs that it has opened. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from tandem.protocol.messages.membership import PairChanges, PairStatus


class ReportedPairs:
    """Finds what has changed since the last report. All proxies get the same reports."""

    def __init__(self) -> None:
        self.num_changes = 0
        """See WorkerStatus.num_pair_changes."""
        self._reported: dict[str, PairStatus] | None = None  # by the decode worker's epoch; None to report all

    def take(self, pairs: Iterable[PairStatus]) -> PairChanges | None:
        """Returns what the next report says of these pairs, or None if the last one said the same."""
        before, self._reported = self._reported, {pair.decode_epoch: pair for pair in pairs}
        if before is None:
            self.num_changes += 1
            return PairChanges(0, list(self._reported.values()))
        changed = [pair for epoch, pair in self._reported.items() if before.get(epoch) != pair]
        gone = [epoch for epoch in before if epoch not in self._reported]
        if not changed and not gone:
            return None
        self.num_changes += 1
        return PairChanges(self.num_changes - 1, changed, gone)

    def restart(self) -> None:
        """Lets the next report have all pairs."""
        self._reported = None
