"""Checks of message values that types cannot express. Pure.

A value that would corrupt something is refused with its message, before it reaches a scheduler: a wrong token id would
fail the step of a whole batch, and a negative block id would write to another sequence's block. Each `check_` function
raises InvalidMessage, which names the field.

A figure that informs and decides nothing irrevocable (a load, speed, duration or count) must not silence its sender: a
worker whose report has one bad figure still serves. The `plausible_` functions return what the receiver uses instead.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np

from tandem.protocol.messages.dispatch import PromptMessage, StartPrefill
from tandem.protocol.messages.grammar import MAX_GRAMMAR_BYTES
from tandem.protocol.messages.membership import PrefixUpdate, RegisterWorker, WorkerLoad, WorkerStatus
from tandem.protocol.messages.numerics import Numerics
from tandem.protocol.messages.packed import BYTES_PER_TOKEN
from tandem.protocol.messages.sampling import SamplingParams
from tandem.protocol.messages.transfer import FinishTransfer, KVReserved, OpenPair, PairAccepted
from tandem.runtime.errors import InvalidMessage

MAX_SEQUENCES = 1024
"""Sequences that share one prompt. Clients may ask for 128."""
MAX_DEADLINE_S = 30 * 86400.0
MAX_HELD_SEQUENCES = 100_000
"""Sequences on one worker, waiting and running. Proxies admit far fewer."""
MAX_NAME_CHARACTERS = 1024
MAX_NUMERICS_CHARACTERS = 4096
"""Of one field of the numerics: each report of the workers repeats them."""
MAX_RANKS = 1024
MAX_POSITION_OFFSET = 2**24
"""Positions up to this are exact in float32. A larger offset would overflow a step's int32 positions."""
MAX_TIERS = 16
"""Tiers of one worker's KV cache."""
MAX_BLOCK_GROUPS = 64
MAX_PAIRS = 4096
"""Pairs of one worker, i.e. workers of the other role."""
MAX_CLOSED_PAIRS = 1000
"""Pairs with one worker that were closed before and are named in `OpenPair`; the newest."""
MAX_ADDRESS_BYTES = 64 * 1024
"""Address of one data path in `PairAccepted`. NIXL's has some kilobytes for each network adapter."""
_MAX_FEW_LOGPROBS = 256
"""Top tokens that may be asked for even if the vocabulary is smaller: a beam search of width 128 needs 256."""
MAX_LORA_MODULES = 100_000
_MAX_PID = 2**22
_INT64 = range(-(2**63), 2**64)
_ENDPOINT = re.compile(r"ipc:///[^\x00-\x1f\x7f]{1,106}|tcp://(?:\[[0-9a-fA-F:.%\w]+\]|[\w.-]+):\d{1,5}")


def check_request(message: PromptMessage, vocab_size: int, max_model_len: int) -> None:
    """Checks a prompt for a worker whose model has this vocabulary and length."""
    kind = type(message).__name__
    _require(1 <= len(message.attempt_ids) <= MAX_SEQUENCES, kind, "attempt_ids", "too few or too many")
    _require(len(set(message.attempt_ids)) == len(message.attempt_ids), kind, "attempt_ids", "a duplicate")
    _require(len(message.seeds) == len(message.attempt_ids), kind, "seeds", "not one for each attempt")
    _require(all(seed in _INT64 for seed in message.seeds), kind, "seeds", "more than 64 bits")
    _check_names(kind, (message.proxy_id, message.transfer_id, *message.attempt_ids))
    _require(abs(message.deadline_s) <= MAX_DEADLINE_S, kind, "deadline_s", "not finite, or too long")
    num_tokens, rest = divmod(len(message.token_ids), BYTES_PER_TOKEN)
    _require(rest == 0 and num_tokens > 0, kind, "token_ids", "empty or truncated")
    _require(0 <= message.num_generated < num_tokens, kind, "num_generated", "out of range")
    _require(message.stop.max_tokens >= 1 and message.stop.min_tokens >= 0, kind, "stop", "negative")
    whole = num_tokens - message.num_generated + message.stop.max_tokens
    _require(whole <= max_model_len + 1, kind, "stop.max_tokens", f"{whole} tokens, the model takes {max_model_len}")
    ids = np.frombuffer(message.token_ids, np.int32)
    _require(int(ids.min()) >= 0 and int(ids.max()) < vocab_size, kind, "token_ids", "not in the vocabulary")
    _require(abs(message.priority) < 2**31, kind, "priority", "out of range")
    _check_sampling(kind, message.sampling, vocab_size)
    is_endpoint = _ENDPOINT.fullmatch(message.media_cache) is not None
    _require(not message.media_cache or is_endpoint, kind, "media_cache", "cannot be connected to")
    if message.adapter is not None:
        _check_names(kind, (message.adapter.digest, message.adapter.folder))
    if isinstance(message, StartPrefill):
        is_alone = message.pooling is None or (message.decode_epoch is None and len(message.attempt_ids) == 1)
        _require(is_alone, kind, "pooling", "together with tokens")
        is_complete = (message.decode_worker_id is None) == (message.decode_epoch is None)
        _require(is_complete, kind, "decode_worker_id", "id without epoch, or epoch without id")
        num_top = message.num_prompt_logprobs or 0
        _require(0 <= num_top <= max(vocab_size, _MAX_FEW_LOGPROBS), kind, "num_prompt_logprobs", "out of range")


def _check_sampling(kind: str, sampling: SamplingParams, vocab_size: int) -> None:
    factors = (sampling.temperature, sampling.top_p, sampling.min_p, sampling.repetition_penalty)
    added = (sampling.presence_penalty, sampling.frequency_penalty, *(bias for _, bias in sampling.logit_bias))
    _require(all(math.isfinite(number) for number in (*factors, *added)), kind, "sampling", "not finite")
    _require(sampling.temperature >= 0, kind, "temperature", "negative")
    _require(0 < sampling.top_p <= 1 and 0 <= sampling.min_p <= 1, kind, "top_p or min_p", "out of range")
    _require(sampling.repetition_penalty > 0, kind, "repetition_penalty", "not positive")
    _require(0 <= sampling.top_k < 2**31, kind, "top_k", "out of range")
    _require(sampling.seed in _INT64, kind, "seed", "more than 64 bits")
    num_top = sampling.logprobs or 0
    _require(0 <= num_top <= max(vocab_size, _MAX_FEW_LOGPROBS), kind, "logprobs", "out of range")
    _require(len(sampling.logprob_token_ids) <= _MAX_FEW_LOGPROBS, kind, "logprob_token_ids", "too many")
    biased = (token_id for token_id, _ in sampling.logit_bias)
    _require(all(sampling.bad_words), kind, "bad_words", "one is empty")
    banned = (token_id for word in sampling.bad_words for token_id in word)
    named = (*biased, *sampling.allowed_token_ids, *banned, *sampling.logprob_token_ids)
    _require(all(0 <= token_id < 2**31 for token_id in named), kind, "sampling", "a token id is out of range")
    _require(len(sampling.grammar or "") <= MAX_GRAMMAR_BYTES, kind, "grammar", "too long")


def check_finish_transfer(message: FinishTransfer, vocab_size: int) -> None:
    """Checks the first tokens and the position that a decode worker starts from."""
    kind, first_token_ids = "FinishTransfer", message.first_token_ids
    _require(1 <= len(first_token_ids) <= MAX_SEQUENCES, kind, "first_token_ids", "too few or too many")
    in_range = all(0 <= token_id < vocab_size for token_id in first_token_ids)
    _require(in_range, kind, "first_token_ids", "not in the vocabulary")
    _require(abs(message.position_offset) <= MAX_POSITION_OFFSET, kind, "position_offset", "out of range")


def check_reserved(message: KVReserved) -> None:
    """Checks reserved block ids. The connector checks whether they exist in the peer's pool."""
    _require(1 <= len(message.groups) <= MAX_BLOCK_GROUPS, "KVReserved", "groups", "too few or too many")
    _require(all(group.first_block >= 0 for group in message.groups), "KVReserved", "groups", "negative")
    ids = [block_id for group in message.groups for block_id in group.block_ids]
    in_range = all(0 <= each < 2**31 for each in ids)
    _require(in_range and len(set(ids)) == len(ids), "KVReserved", "block_ids", "negative, or a duplicate")


def check_open_pair(message: OpenPair) -> None:
    kind, layout = "OpenPair", message.layout
    sizes = (layout.num_layers, layout.num_kv_heads, layout.head_dim, layout.block_size, layout.tensor_parallel_size)
    _require(all(0 < size < 2**31 for size in sizes), kind, "layout", "not positive")
    _require(layout.tensor_parallel_size <= MAX_RANKS, kind, "layout", "too many ranks")
    pids = message.prefill_pids
    _require(len(pids) <= MAX_RANKS and all(0 < pid <= _MAX_PID for pid in pids), kind, "prefill_pids", "out of range")
    _require(math.isfinite(message.lease_s) and message.lease_s >= 0.1, kind, "lease_s", "out of range")
    _require(len(message.connectors) <= 64, kind, "connectors", "too many")
    _require(len(message.closed_pair_ids) <= MAX_CLOSED_PAIRS, kind, "closed_pair_ids", "too many")
    _check_names(kind, message.closed_pair_ids)
    _check_names(kind, (message.pair_id, message.prefill_worker_id, message.prefill_epoch))
    _check_numerics(kind, layout.numerics)


def check_pair_accepted(message: PairAccepted) -> None:
    """Checks the number and size of the addresses. The connector checks their contents."""
    kind, addresses = "PairAccepted", message.addresses
    _require(1 <= len(addresses) <= MAX_RANKS, kind, "addresses", "of too few or too many ranks")
    _require(all(len(each) <= MAX_RANKS for each in addresses), kind, "addresses", "too many of a rank")
    sizes = [len(address) for each in addresses for address in each]
    _require(max(sizes, default=0) <= MAX_ADDRESS_BYTES, kind, "addresses", f"one has over {MAX_ADDRESS_BYTES} bytes")


def check_register(message: RegisterWorker) -> None:
    worker = message.worker
    _check_names("RegisterWorker", (worker.worker_id, worker.epoch))
    _require(len(worker.host_id) <= MAX_NAME_CHARACTERS, "RegisterWorker", "host_id", "too long")
    _require(len(message.engine) <= MAX_NAME_CHARACTERS, "RegisterWorker", "engine", "too long")
    _require(_ENDPOINT.fullmatch(worker.endpoint) is not None, "RegisterWorker", "endpoint", "cannot be connected to")
    sizes = [worker.pid, worker.num_ranks, message.max_model_len, message.vocab_size, message.block_size]
    _require(len(message.lora_modules) <= MAX_LORA_MODULES, "RegisterWorker", "lora_modules", "too many")
    sizes.append(message.max_lora_rank)
    _require(all(0 < size < 2**31 for size in sizes), "RegisterWorker", "a size", "not positive")
    _check_numerics("RegisterWorker", message.numerics)


def _check_names(kind: str, names: Iterable[str]) -> None:
    _require(all(0 < len(name) <= MAX_NAME_CHARACTERS for name in names), kind, "names", "empty or too long")


def _check_numerics(kind: str, numerics: Numerics) -> None:
    values = [getattr(numerics, field) for field in numerics.__struct_fields__]
    texts = [value for value in values if isinstance(value, str)]
    numbers = [value for value in values if isinstance(value, int)]
    _require(all(len(text) <= MAX_NUMERICS_CHARACTERS for text in texts), kind, "numerics", "too long")
    _require(all(0 <= number < 2**31 for number in numbers), kind, "numerics", "a number is out of range")


def _require(holds: bool, kind: str, field: str, what: str) -> None:
    if not holds:
        raise InvalidMessage(f"{kind}.{field}: {what}")


MAX_FIGURE = 1e15
"""Seconds, or tokens per second, above which a figure is wrong."""
MIN_FIGURE = 1e-9
"""Seconds, or tokens per second, below which a figure is the rounding error of a zero."""
MAX_COUNT = 2**63 - 1
MAX_PRIORITIES = 4096
"""Entries of `WorkerLoad.waiting_tokens`."""

_MAX_ENTRIES = {
    "waiting_tokens": MAX_PRIORITIES,
    "tiers": MAX_TIERS,
    "traffic": MAX_PAIRS,
}


def plausible_figure(value: float) -> float:
    """Returns the figure if it can be true, else 0. NaN, infinite, negative and huge values cannot."""
    return value if MIN_FIGURE <= value <= MAX_FIGURE else 0.0


def plausible_count(value: int, most: int = MAX_COUNT) -> int:
    """Returns the nearest count from 0 to `most`."""
    return min(max(value, 0), most)


def plausible_status(message: WorkerStatus, last_load: WorkerLoad) -> tuple[WorkerStatus, list[str]]:
    """Replaces figures that cannot be true by those of the worker's last report. Returns also the names of what was
    replaced.

    Too many pairs and truncated prefix updates are left out; the gap in the numbers makes the proxy ask for all.
    """
    dropped: list[str] = []
    load: dict[str, Any] = {}
    for field, value in zip(WorkerLoad.__struct_fields__, msgspec.structs.astuple(message.load), strict=True):
        if type(value) is int and 0 <= value <= MAX_COUNT:  # most of them
            continue
        if isinstance(value, float) and -MIN_FIGURE < value < MIN_FIGURE:
            if value:
                load[field] = 0.0
        elif not _is_plausible(value) or (isinstance(value, list) and len(value) > _MAX_ENTRIES[field]):
            load[field] = getattr(last_load, field)
            dropped.append(f"load.{field}")
    changes: dict[str, Any] = {"load": msgspec.structs.replace(message.load, **load)} if load else {}
    if (pairs := message.pairs) is not None and max(len(pairs.changed), len(pairs.gone)) > MAX_PAIRS:
        changes["pairs"] = None
        dropped.append("pairs")
    for field in ("prefixes", "tier_prefixes"):
        update: PrefixUpdate | None = getattr(message, field)
        if update is not None and (len(update.added) % 8 or len(update.evicted) % 8):
            changes[field] = None
            dropped.append(field)
    return msgspec.structs.replace(message, **changes) if changes else message, dropped


def _is_plausible(value: Any) -> bool:
    """Whether a figure, or each in a list of named figures, can be true."""
    if isinstance(value, int):
        return 0 <= value <= MAX_COUNT
    if isinstance(value, float):
        return value == 0 or MIN_FIGURE <= value <= MAX_FIGURE
    if isinstance(value, str):
        return True
    if isinstance(value, list):
        return all(map(_is_plausible_entry, value))
    raise TypeError(f"a figure of type {type(value).__name__}")


def _is_plausible_entry(entry: Any) -> bool:
    if isinstance(entry, tuple):
        label, number = entry  # the label of waiting tokens is a priority, which may be negative
        return (isinstance(label, str) or abs(label) < 2**31) and _is_plausible(number)
    return all(map(_is_plausible, msgspec.structs.astuple(entry)))
