"""Acts as a proxy that sends valid messages several times, out of order, and again after the request has ended."""

from __future__ import annotations

import random
import time
from collections import Counter
from typing import Any

import msgspec
import zmq

from tandem.protocol.messages.dispatch import (
    AbortAttempt,
    AttemptFailed,
    FirstToken,
    PrepareDecode,
    StartPrefill,
    TokenBatch,
    ToProxy,
)
from tandem.protocol.messages.membership import WorkerInfo
from tandem.protocol.messages.packed import pack_token_ids
from tandem.protocol.messages.sampling import SamplingParams, StopConditions
from tandem.runtime.errors import InternalError

_PROXY = "replaying-proxy"
_NUM_TOKENS = 3
_TIMEOUT_S = 30.0
Message = StartPrefill | PrepareDecode | AbortAttempt


class ReplayingProxy:
    """Sends requests to one prefill and one decode worker. `outcomes` counts how they ended."""

    def __init__(self, rng: random.Random, prefill: WorkerInfo, decode: WorkerInfo) -> None:
        self._rng = rng
        self._prefill, self._decode = prefill, decode
        self._encoder, self._decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(ToProxy)
        self.outcomes: Counter[str] = Counter()

    def run(self, count: int) -> int:
        """Returns the number of messages sent. Raises TimeoutError when a request that was not aborted does not end."""
        rng, num_sent = self._rng, 0
        context = zmq.Context()
        to = {worker.epoch: self._connect(context, worker) for worker in (self._prefill, self._decode)}
        try:
            while num_sent < count:
                name = rng.randbytes(8).hex()
                messages = self._request(name)
                num_copies = rng.randint(1, 3)
                messages *= num_copies
                rng.shuffle(messages)
                is_aborted = rng.random() < 0.3
                if is_aborted:
                    for epoch in to:
                        messages.insert(rng.randrange(len(messages) + 1), (epoch, AbortAttempt(_PROXY, name)))
                for epoch, message in messages:
                    to[epoch].send(self._encoder.encode(message))
                if not is_aborted:
                    self.outcomes[self._await_end(list(to.values()), name, num_copies > 1)] += 1
                for epoch, message in messages:  # again after the end; aborts what this restarts
                    to[epoch].send(self._encoder.encode(message))
                for epoch in to:
                    to[epoch].send(self._encoder.encode(AbortAttempt(_PROXY, name)))
                num_sent += 2 * len(messages) + len(to)
        finally:
            for socket in to.values():
                socket.close()
            context.term()
        return num_sent

    def _connect(self, context: zmq.Context[Any], worker: WorkerInfo) -> Any:
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 2000)
        socket.setsockopt(zmq.IDENTITY, f"{_PROXY}:0".encode())
        socket.connect(worker.endpoint)
        return socket

    def _request(self, name: str) -> list[tuple[str, Message]]:
        """Returns the messages of one request, each with the epoch of its worker."""
        tokens = pack_token_ids([self._rng.randrange(4, 200) for _ in range(self._rng.choice((1, 40, 200)))])
        stop = StopConditions(_NUM_TOKENS, frozenset())
        common: dict[str, Any] = {
            "proxy_id": _PROXY, "attempt_ids": [name], "transfer_id": f"t-{name}", "token_ids": tokens,
            "sampling": SamplingParams(), "seeds": [1], "stop": stop, "deadline_s": 60.0,
        }  # fmt: skip
        prefill, decode = self._prefill, self._decode
        return [
            (prefill.epoch, StartPrefill(decode_worker_id=decode.worker_id, decode_epoch=decode.epoch, **common)),
            (decode.epoch, PrepareDecode(prefill_worker_id=prefill.worker_id, prefill_epoch=prefill.epoch, **common)),
        ]

    def _await_end(self, sockets: list[Any], name: str, has_copies: bool) -> str:
        """Returns the finish reason or error code. With `has_copies` ignores the refusal of a duplicate."""
        poller = zmq.Poller()
        for socket in sockets:
            poller.register(socket, zmq.POLLIN)
        deadline = time.monotonic() + _TIMEOUT_S
        while time.monotonic() < deadline:
            for socket, _ in poller.poll(1000):
                for end in _ends(self._decoder.decode(socket.recv()), name):
                    if not (has_copies and end == InternalError.code):
                        return end
        raise TimeoutError(f"a replayed request did not end within {_TIMEOUT_S:.0f} s")


def _ends(message: Any, name: str) -> list[str]:
    match message:
        case AttemptFailed(attempt_id=attempt_id, error=error) if attempt_id == name:
            return [error.code]
        case FirstToken(attempt_id=attempt_id, finish_reason=reason) if attempt_id == name and reason is not None:
            return [reason]
        case TokenBatch(tokens=tokens):
            return [t.finish_reason for t in tokens if t.attempt_id == name and t.finish_reason is not None]
        case _:
            return []
