"""Reasons of rejected requests, as the metrics label them."""

from __future__ import annotations

from tandem.proxy.admission.admission import ClientLimitExceeded, QueueFull
from tandem.proxy.cluster.router import SLOUnreachable
from tandem.runtime.errors import ClientShareExceeded, Overloaded, TandemError

CAPACITY_REASONS = ("queue_full", "slo", "no_room")
"""Reasons that more workers would remedy. A client that exceeds its own limit is not among them."""


def rejection_reason(error: TandemError) -> str | None:
    """Returns the label of a refusal by a limit, or None for any other error."""
    match error:
        case ClientLimitExceeded() | ClientShareExceeded():
            return "client_limit"
        case QueueFull():
            return "queue_full"
        case SLOUnreachable():
            return "slo"
        case Overloaded():
            return "no_room"
        case _:
            return None
