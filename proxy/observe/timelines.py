"""The timeline of one request, from this proxy's log or from the proxies that share its port.

The kernel chooses the proxy for each connection, so an operator may reach another proxy than the client did.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import msgspec

from tandem.protocol.codec import Codec
from tandem.protocol.messages.membership import FromProxyControl, GetTimeline, TimelineReport
from tandem.protocol.sockets import DealerSocket
from tandem.telemetry.request_log import RequestLog

log = logging.getLogger(__name__)

ANSWER_TIMEOUT_S = 1.0


class Timelines:
    """peer_endpoints: the other proxies' control sockets, connected at the first lookup."""

    def __init__(self, context: Any, requests: RequestLog, peer_endpoints: list[str]) -> None:
        self._context = context
        self._requests = requests
        self._peer_endpoints = peer_endpoints
        self._peers: list[DealerSocket[FromProxyControl]] = []
        self._lookups: dict[str, _Lookup] = {}

    def own(self, request_id: str) -> bytes:
        """Returns JSON, empty for an unknown or forgotten request."""
        record = self._requests.find(request_id)
        return b"" if record is None else msgspec.json.encode(record.timeline())

    async def find(self, request_id: str) -> bytes:
        """Returns the same from any proxy that answers within one second."""
        if (own := self.own(request_id)) or not self._peer_endpoints:
            return own
        if not self._peers:
            codec: Codec[FromProxyControl] = Codec(FromProxyControl)
            self._peers = [
                DealerSocket(self._context, endpoint, codec, self._on_answer, peer="proxy")
                for endpoint in self._peer_endpoints
            ]
        lookup = self._lookups.get(request_id)
        if lookup is None:
            lookup = self._lookups[request_id] = _Lookup(len(self._peers))
            for peer in self._peers:
                peer.send(GetTimeline(request_id))
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                return await asyncio.shield(lookup.answer)
        except TimeoutError:
            log.warning("not every proxy answered for request %s", request_id)
            return b""
        finally:
            self._lookups.pop(request_id, None)

    def _on_answer(self, message: FromProxyControl) -> None:
        if isinstance(message, TimelineReport) and (lookup := self._lookups.get(message.request_id)) is not None:
            lookup.on_answer(message.timeline)

    def close(self) -> None:
        for peer in self._peers:
            peer.close()


class _Lookup:
    """Resolved by the first proxy that knows the request, or by the last one that does not."""

    def __init__(self, num_asked: int) -> None:
        self.answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._num_open = num_asked

    def on_answer(self, timeline: bytes) -> None:
        self._num_open -= 1
        if not self.answer.done() and (timeline or not self._num_open):
            self.answer.set_result(timeline)
