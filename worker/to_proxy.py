"""Sends a worker's answers to the proxies of its requests."""

from __future__ import annotations

import logging

from tandem.protocol.codec import MessageTooLarge
from tandem.protocol.messages.dispatch import AttemptFailed, FirstToken, ToProxy
from tandem.protocol.messaging import MessageRouter
from tandem.runtime.errors import ErrorInfo

log = logging.getLogger(__name__)


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
