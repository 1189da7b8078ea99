"""How long prefill keeps blocks for a decode worker that does not fetch them; pure.

A lease begins when ReserveKV goes out and ends with its transfer. Decode renews it for as long as it wants the blocks
(RenewLeases, one message for all of a pair's); one that runs out fails its transfer alone. It covers what the pair's
own end does not: a control message that was lost, a decode worker that has forgotten the transfer or is stuck. That
decode asks again rather than prefill counting on a time-out of the whole request is the design of vLLM's NIXL
connector.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(eq=False)
class _Lease:
    pair_id: str
    expires_at: float


class Leases:
    """Of one prefill worker, by transfer id. term_s: from a renewal to the end."""

    def __init__(self, term_s: float) -> None:
        self.term_s = term_s
        self._leases: dict[str, _Lease] = {}
        self._seen_at: float | None = None

    def __len__(self) -> int:
        return len(self._leases)

    def begin(self, now: float, pair_id: str, transfer_id: str) -> None:
        self._leases[transfer_id] = _Lease(pair_id, now + self.term_s)

    def renew(self, now: float, pair_id: str, transfer_ids: list[str]) -> None:
        """Those that this pair does not have, for they have ended or are another's, are passed over."""
        for transfer_id in transfer_ids:
            lease = self._leases.get(transfer_id)
            if lease is not None and lease.pair_id == pair_id:
                lease.expires_at = now + self.term_s

    def end(self, transfer_id: str) -> None:
        self._leases.pop(transfer_id, None)

    def expired(self, now: float) -> list[str]:
        """Transfers whose lease has run out, which then have none. To be called often.

        When it was not called for long this process stood still, and renewals lie unread in its sockets: no decode
        worker is to blame for that time, so it does not count. Up to half a term nothing can be missed: a renewal that
        was read is at most a third of a term older than one that was not.
        """
        unseen_s = 0.0 if self._seen_at is None else now - self._seen_at
        self._seen_at = now
        if unseen_s > self.term_s / 2:
            for lease in self._leases.values():
                lease.expires_at = max(lease.expires_at, min(lease.expires_at + unseen_s, now + self.term_s))
        over = [transfer_id for transfer_id, lease in self._leases.items() if now >= lease.expires_at]
        for transfer_id in over:
            del self._leases[transfer_id]
        return over
