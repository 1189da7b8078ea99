"""The messages that dispatch the sequences of one prompt to the workers of a route. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tandem.protocol.messages.dispatch import PrepareDecode, StartPrefill
from tandem.protocol.messages.token_ids import pack_token_ids
from tandem.proxy.cluster.router import Route
from tandem.proxy.dispatch.sequence import DispatchedSequence
from tandem.runtime.host import is_elsewhere


def prompt_messages(
    now: float,
    proxy_id: str,
    transfer_id: str,
    sequences: Sequence[DispatchedSequence],
    attempt_ids: list[str],
    route: Route,
    media_cache: str,
) -> tuple[PrepareDecode | None, StartPrefill]:
    """Returns the messages to the decode worker, if it is another one, and to the worker that prefills.

    now: loop time. sequences: of one prompt, with the same tokens generated so far. attempt_ids: one for each.
    """
    first = sequences[0]
    prompt, generated = first.prompt, first.generated
    prefill, decode = route.prefill, route.decode
    shared: dict[str, Any] = {
        "proxy_id": proxy_id,
        "attempt_ids": attempt_ids,
        "transfer_id": transfer_id,
        "token_ids": prompt.token_ids + pack_token_ids(generated),
        "sampling": first.sampling,
        "seeds": [sequence.sampling.seed for sequence in sequences],
        "stop": first.stop,
        "deadline_s": first.deadline - now,
        "num_generated": len(generated),
        "cache_salt": prompt.cache_salt,
        "priority": prompt.priority,
        "media": prompt.media,
        "adapter": prompt.adapter,
    }
    prepare = None
    if decode is not None and route.is_shipped:
        prepare = PrepareDecode(
            **shared,
            prefill_worker_id=prefill.worker_id,
            prefill_epoch=prefill.epoch,
            media_cache=media_cache if prompt.media and is_elsewhere(decode.host_id) else "",
        )
    start = StartPrefill(
        **shared,
        decode_worker_id=decode.worker_id if decode is not None else None,
        decode_epoch=decode.epoch if decode is not None else None,
        num_prompt_logprobs=None if generated else prompt.num_prompt_logprobs,
        pooling=prompt.pooling,
        media_cache=media_cache if prompt.media and is_elsewhere(prefill.host_id) else "",
    )
    return prepare, start
