"""Why a request was refused for want of room, in the few words that the metrics have for it."""

from __future__ import annotations

from tandem.proxy.admission.admission import ClientLimitExceeded, QueueFull
from tandem.proxy.cluster.router import SLOUnreachable
from tandem.runtime.errors import Overloaded, TandemError

FOR_WANT_OF_ROOM = ("queue_full", "slo", "no_room")
"""Reasons that more workers would mend: not that of a client which has too many under way."""


def rejection_reason(error: TandemError) -> str | None:
    """None for what is no rejection: an error that more room would not have prevented."""
    match error:
        case ClientLimitExceeded():
            return "client_limit"
        case QueueFull():
            return "queue_full"
        case SLOUnreachable():
            return "slo"
        case Overloaded():
            return "no_room"
        case _:
            return None
