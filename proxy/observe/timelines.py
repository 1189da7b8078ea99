"""The timeline of one request, from this proxy's log or from the proxies that share its port.

The kernel chooses the proxy for each connection, so an operator may reach another proxy than the client did.
"""

from __future__ import annotations

import asyncio
import logging

import msgspec

from tandem.protocol.codec import Codec
from tandem.protocol.messages.membership import FromProxyControl, GetTimeline, TimelineReport
from tandem.protocol.messaging import MessageDealer, Network
from tandem.telemetry.request_log import RequestLog

log = logging.getLogger(__name__)

ANSWER_TIMEOUT_S = 1.0


class Timelines:
    """peer_endpoints: the other proxies' control sockets, connected at the first lookup."""

    def __init__(self, network: Network, requests: RequestLog, peer_endpoints: list[str]) -> None:
        self._network = network
        self._requests = requests
        self._peer_endpoints = peer_endpoints
        self._peers: list[MessageDealer] = []
        self._lookups: list[tuple[str, asyncio.Queue[bytes]]] = []  # (request_id, the peers' answers)

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
                self._network.dealer(endpoint, codec, self._on_answer, peer="proxy")
                for endpoint in self._peer_endpoints
            ]
        lookup = request_id, asyncio.Queue[bytes]()
        self._lookups.append(lookup)
        for peer in self._peers:
            peer.send(GetTimeline(request_id))
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                for _ in self._peers:
                    if timeline := await lookup[1].get():
                        return timeline
        except TimeoutError:
            log.warning("not every proxy answered for request %s", request_id)
        finally:
            self._lookups.remove(lookup)
        return b""

    def _on_answer(self, message: FromProxyControl) -> None:
        if isinstance(message, TimelineReport):
            for request_id, answers in self._lookups:
                if request_id == message.request_id:
                    answers.put_nowait(message.timeline)

    def close(self) -> None:
        for peer in self._peers:
            peer.close()
