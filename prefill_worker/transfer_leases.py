"""Limits how long prefill keeps blocks for a decode worker that has stopped renewing its lease. Pure.

A lease begins with ReserveKV and ends with its transfer. Decode renews it while it wants the blocks (one RenewLeases
for all transfers of a pair). An expired lease fails its transfer only. Leases catch failures that leave the pair
open: a lost control message, or a decode worker that has forgotten the transfer or is stuck. vLLM's NIXL connector has
the same design.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(eq=False)
class _TransferLease:
    pair_id: str
    expires_at: float


class Leases:
    """Leases of one prefill worker, by transfer id. term_s: lifetime after a renewal."""

    def __init__(self, term_s: float) -> None:
        self.term_s = term_s
        self._leases: dict[str, _TransferLease] = {}
        self._seen_at: float | None = None

    def begin(self, now: float, pair_id: str, transfer_id: str) -> None:
        self._leases[transfer_id] = _TransferLease(pair_id, now + self.term_s)

    def renew(self, now: float, pair_id: str, transfer_ids: list[str]) -> None:
        """Renews leases. Transfers that have ended or belong to another pair are ignored."""
        for transfer_id in transfer_ids:
            lease = self._leases.get(transfer_id)
            if lease is not None and lease.pair_id == pair_id:
                lease.expires_at = now + self.term_s

    def end(self, transfer_id: str) -> None:
        self._leases.pop(transfer_id, None)

    def expired(self, now: float) -> list[str]:
        """Returns and ends the leases that have expired. Must be called often.

        A long gap between calls means that this process was stalled and renewals lie unread in its sockets, so that
        time does not count. Gaps up to half a term are safe: decode renews three times per term.
        """
        unseen_s = 0.0 if self._seen_at is None else now - self._seen_at
        self._seen_at = now
        if unseen_s > self.term_s / 2:
            for lease in self._leases.values():
                lease.expires_at = max(lease.expires_at, min(lease.expires_at + unseen_s, now + self.term_s))
        expired = [transfer_id for transfer_id, lease in self._leases.items() if now >= lease.expires_at]
        for transfer_id in expired:
            del self._leases[transfer_id]
        return expired
