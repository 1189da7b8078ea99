"""A worker's answers to the proxies of its requests."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from tandem.protocol.codec import MessageTooLarge
from tandem.protocol.messages.checks import MAX_SEQUENCES, check_request
from tandem.protocol.messages.dispatch import (
    AttemptFailed,
    FirstToken,
    Ping,
    Pong,
    PrepareDecode,
    StartPrefill,
    TokenBatch,
    ToProxy,
)
from tandem.protocol.messaging import MessageRouter
from tandem.runtime.errors import ErrorInfo, InternalError, InvalidMessage, TandemError
from tandem.telemetry.worker_metrics import WorkerMetrics

A = TypeVar("A")

log = logging.getLogger(__name__)


class ProxyAnswers:
    """Sends answers through the worker's router, and counts them. epoch: of the worker."""

    def __init__(self, router: MessageRouter, epoch: str, metrics: WorkerMetrics) -> None:
        self._router = router
        self._epoch = epoch
        self._metrics = metrics

    def send(self, proxy_id: str, message: ToProxy) -> None:
        match message:
            case TokenBatch():
                for began in message.began:
                    self._metrics.decode_wait.observe(began.decode_wait_s)
            case FirstToken():
                self._metrics.queue.observe(message.queue_s)
                self._metrics.prefill.observe(message.prefill_s)
        send_to_proxy(self._router, proxy_id, message)

    def answer(self, identity: bytes, ping: Ping) -> None:
        """Shows the proxy that this worker hears it, and that it is heard. identity: of the proxy's connection."""
        self._router.send(identity, Pong(self._epoch, ping.number))

    def take(
        self,
        message: StartPrefill | PrepareDecode,
        vocab_size: int,
        max_model_len: int,
        open_prompt: Callable[[StartPrefill | PrepareDecode], list[A]],
    ) -> list[A]:
        """Returns the actions of `open_prompt`, or answers with its error and returns none.

        vocab_size, max_model_len: of the model. Raises InvalidMessage, after its answer, for a message that no proxy
        would send.
        """
        try:
            check_request(message, vocab_size, max_model_len)
            return open_prompt(message)
        except InvalidMessage as error:
            self._refuse(message, InternalError(error.message))
            raise
        except TandemError as error:
            self._refuse(message, error)
        except Exception as error:
            log.exception("a prompt could not be opened")
            self._refuse(message, InternalError(f"the prompt could not be opened: {error}"))
        return []

    def _refuse(self, message: StartPrefill | PrepareDecode, error: TandemError) -> None:
        for attempt_id in message.attempt_ids[:MAX_SEQUENCES]:
            send_to_proxy(self._router, message.proxy_id, AttemptFailed(attempt_id, ErrorInfo.of(error)))


def send_to_proxy(router: MessageRouter, proxy_id: str, message: ToProxy) -> None:
    """Sends a message, or drops it if the proxy is gone. A first token over the size limit fails its attempt."""
    identity = f"{proxy_id}:0".encode()
    try:
        is_sent = router.send(identity, message)
    except MessageTooLarge as error:
        if not isinstance(message, FirstToken):
            raise
        is_sent = router.send(identity, AttemptFailed(message.attempt_id, ErrorInfo.of(error)))
    if not is_sent:
        log.warning("proxy %s is not connected; a message to it was dropped", proxy_id)
