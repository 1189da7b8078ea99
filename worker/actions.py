"""The action that both schedulers ask of their shells."""

from __future__ import annotations

import msgspec

from tandem.protocol.messages.dispatch import ToProxy


class SendToProxy(msgspec.Struct, frozen=True):
    proxy_id: str
    message: ToProxy
