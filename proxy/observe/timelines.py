"""What became of one request: from this proxy's own log, else from the proxies that share its port.

A client's connection reaches one of the proxies, by the kernel's choice; who asks afterwards may reach another.
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
    """peer_endpoints: the other proxies' control sockets. A connection is made when the first question comes."""

    def __init__(self, context: Any, requests: RequestLog, peer_endpoints: list[str]) -> None:
        self._context = context
        self._requests = requests
        self._peer_endpoints = peer_endpoints
        self._peers: list[DealerSocket[FromProxyControl]] = []
        self._asked: dict[str, _Question] = {}

    def own(self, request_id: str) -> bytes:
        """JSON; empty where the request is not known (any more)."""
        record = self._requests.find(request_id)
        return b"" if record is None else msgspec.json.encode(record.timeline())

    async def find(self, request_id: str) -> bytes:
        """As `own`, but of all proxies, as far as they answer in time."""
        if (own := self.own(request_id)) or not self._peer_endpoints:
            return own
        if not self._peers:
            codec: Codec[FromProxyControl] = Codec(FromProxyControl)
            self._peers = [
                DealerSocket(self._context, endpoint, codec, self._on_answer, peer="proxy")
                for endpoint in self._peer_endpoints
            ]
        question = self._asked.get(request_id)
        if question is None:
            question = self._asked[request_id] = _Question(len(self._peers))
            for peer in self._peers:
                peer.send(GetTimeline(request_id))
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                return await asyncio.shield(question.answer)
        except TimeoutError:
            log.warning("not every proxy answered for request %s", request_id)
            return b""
        finally:
            self._asked.pop(request_id, None)

    def _on_answer(self, message: FromProxyControl) -> None:
        if isinstance(message, TimelineReport) and (question := self._asked.get(message.request_id)) is not None:
            question.on_answer(message.timeline)

    def close(self) -> None:
        for peer in self._peers:
            peer.close()


class _Question:
    """Answered by the first proxy that knows, or by the last that does not."""

    def __init__(self, num_asked: int) -> None:
        self.answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._num_open = num_asked

    def on_answer(self, timeline: bytes) -> None:
        self._num_open -= 1
        if not self.answer.done() and (timeline or not self._num_open):
            self.answer.set_result(timeline)
