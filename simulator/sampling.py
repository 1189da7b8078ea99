"""The model and the sampler of a simulated cluster: a token is a hash of everything that a real one depends on. Pure.

So the only right answer to each request is known (`simulator.answers`), and a worker that forgets what a sequence has
generated, gives it another seed, or takes the KV of another adapter answers with other tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple

import msgspec

from tandem.protocol.messages.sampling import SampledToken, SamplingParams, TokenLogprobs

VOCAB_SIZE = 50_000
NUM_COMMON_TOKENS = 8
"""The first ones, of which a few come in each answer, so that stop tokens and bans have an effect."""
EOS_TOKEN_ID = 0
_COMMON_INTERVAL = 5
"""One of so many tokens is a common one, in the mean."""
_START = 0x243F6A8885A308D3
_MASK = (1 << 64) - 1


class History(NamedTuple):
    """What sampling knows of a sequence besides its KV."""

    prompt_token_ids: Sequence[int] = ()
    output_token_ids: Sequence[int] = ()
    banned_token_ids: Collection[int] = ()
    grammar: bytes = b""
    """Digest of what the grammar knows, see `grammar_digest`; empty if there is none."""


@lru_cache(maxsize=1024)
def start_state(adapter: str) -> int:
    """Returns the state of an empty sequence. adapter: digest; empty for the base model."""
    return _START if not adapter else _START ^ _number(adapter.encode())


def after(state: int, token_id: int) -> int:
    """Returns the state of a sequence behind one more token."""
    mixed = (state ^ (token_id + 0x9E3779B97F4A7C15)) * 0xBF58476D1CE4E5B9 & _MASK
    return mixed ^ mixed >> 31


def next_token(state: int, banned: Collection[int] = ()) -> int:
    """Returns the token that follows, which is none of the banned ones."""
    while True:
        token_id = 1 + (state >> 20) % (VOCAB_SIZE - 1)
        if (state >> 56) % _COMMON_INTERVAL == 0:
            token_id = (state >> 20) % NUM_COMMON_TOKENS
        if token_id not in banned:
            return token_id
        state = after(state, token_id)


def sampled(state: int, position: int, params: SamplingParams, history: History) -> SampledToken:
    """Returns the token at a position, with its logprobs if they are asked for."""
    value = state ^ _number_of(params)
    if params.temperature:
        value = after(value, params.seed * 0x9E3779B97F4A7C15 + position & _MASK)
    if has_penalties(params):
        value ^= hash((tuple(history.prompt_token_ids), tuple(history.output_token_ids))) & _MASK
    elif params.bad_words:
        value ^= hash(tuple(history.output_token_ids)) & _MASK
    if history.grammar:
        value ^= _number(history.grammar)
    token_id = next_token(value, history.banned_token_ids)
    return SampledToken(token_id, None if params.logprobs is None else logprobs_of(value, token_id, params.logprobs))


def logprobs_of(state: int, token_id: int, num_top: int) -> TokenLogprobs:
    """Returns the logprobs of a token behind a sequence in this state."""
    value = after(state, token_id)
    top = [(1 + (value + number) % (VOCAB_SIZE - 1), -0.5 * number) for number in range(num_top)]
    return TokenLogprobs(-(value % 997) / 64, 1 + value % 9, top)


def has_penalties(params: SamplingParams) -> bool:
    return (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (1.0, 0.0, 0.0)


def needs_history(params: SamplingParams) -> bool:
    return has_penalties(params) or bool(params.bad_words) or params.grammar is not None


def grammar_text(number: int, num_tokens: int) -> str:
    """Returns a grammar that fails once a sequence has so many tokens."""
    return f"{number} {num_tokens}"


def grammar_fails(text: str, num_generated: int) -> bool:
    return num_generated >= int(text.split()[1])


def grammar_digest(text: str, token_ids: Sequence[int], stop_token_ids: Collection[int]) -> bytes:
    """Returns what a grammar's mask depends on. token_ids: generated so far."""
    return _digest(msgspec.msgpack.encode((text, list(token_ids), sorted(stop_token_ids))))


@lru_cache(maxsize=4096)
def _number_of(params: SamplingParams) -> int:
    """Depends on all parameters but the seed."""
    return _number(msgspec.msgpack.encode(msgspec.structs.replace(params, seed=0)))


def _number(data: bytes) -> int:
    return int.from_bytes(_digest(data))


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=8).digest()
