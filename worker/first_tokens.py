"""Messages that report a computed prompt's first tokens; the same from prefill and from decode workers."""

from __future__ import annotations

import logging
from collections.abc import Container
from typing import Any

from tandem.protocol.codec import MessageTooLarge
from tandem.protocol.messages.dispatch import AttemptFailed, FirstToken, PrepareDecode, StartPrefill, ToProxy
from tandem.protocol.messages.generation import SampledToken
from tandem.protocol.sockets import RouterSocket
from tandem.runtime.errors import ErrorInfo

log = logging.getLogger(__name__)


def first_tokens(
    request: StartPrefill | PrepareDecode,
    wanted: Container[str],
    tokens: list[SampledToken],
    queue_s: float,
    prefill_s: float,
    prompt_logprobs: list[bytes],
    num_cached_tokens: int,
) -> list[FirstToken]:
    """Returns one message for each attempt_id in `wanted`.

    tokens: one for each attempt of the request. prompt_logprobs: packed.
    """
    messages = []
    for number, (attempt_id, token) in enumerate(zip(request.attempt_ids, tokens, strict=True)):
        if attempt_id not in wanted:
            continue
        # Sequences that share the prompt get its logprobs once.
        has_logprobs = request.num_prompt_logprobs is not None and number == 0
        finish_reason = request.stop.check(token.token_id, request.num_generated + 1)
        logprobs = prompt_logprobs if has_logprobs else None
        messages.append(FirstToken(attempt_id, token, finish_reason, queue_s, prefill_s, logprobs, num_cached_tokens))
    return messages


def send_to_proxy(router: RouterSocket[Any], proxy_id: str, message: ToProxy) -> None:
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
