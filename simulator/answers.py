"""What clients of a simulated cluster ask for, and the only right answer to it. Pure.

Nothing of the product is called here but the types of messages, so that a fault of the product changes no answer.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import msgspec

from tandem.protocol.messages.sampling import FinishReason, SampledToken, SamplingParams, TokenLogprobs
from tandem.simulator.attachments import ADAPTERS, BROKEN_ADAPTER
from tandem.simulator.sampling import (
    EOS_TOKEN_ID,
    NUM_COMMON_TOKENS,
    History,
    after,
    grammar_digest,
    grammar_fails,
    grammar_text,
    logprobs_of,
    sampled,
    start_state,
)

T = TypeVar("T")

SALTS = ("", "red", "blue")


@dataclass(frozen=True)
class Wishes:
    """What a request asks for besides its prompts and its length. Fields without a comment: see `GenerationRequest`."""

    params: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=0.0))
    seed: int | None = 0
    """None only if sampling is greedy, so that the seed has no effect."""
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    shows_stop: bool = False
    """Whether the text includes the stop string."""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = True
    salt: str = ""
    adapter: str = ""
    """Digest; empty for the base model."""
    num_prompt_logprobs: int | None = None


@dataclass(frozen=True)
class Answer:
    """The answer of one sequence."""

    tokens: list[SampledToken]
    text: str
    finish_reason: FinishReason
    stop_reason: int | str | None = None
    error: str | None = None
    """Code of the error that ends the request behind the tokens; the other fields have no meaning then."""

    @property
    def token_ids(self) -> list[int]:
        return [token.token_id for token in self.tokens]


def draw_wishes(rng: random.Random) -> Wishes:
    """A third of all requests ask for nothing special, the others for any mixture."""
    if rng.random() < 0.35:
        return Wishes(salt=rng.choice(SALTS[:1] * 3 + SALTS))
    params, often = SamplingParams(temperature=rng.choice([0.0, 1.0])), rng.choice([0.2, 0.5])

    def drawn(value: T, otherwise: T) -> T:
        return value if rng.random() < often else otherwise

    pair = f"{rng.randrange(NUM_COMMON_TOKENS)} {rng.randint(1, 9)}"
    digits, common = str(rng.randint(10, 99)), range(NUM_COMMON_TOKENS)
    fails_at = rng.choice([*[1000] * 4, 0, rng.randrange(1, 30)])
    grammar = grammar_text(rng.randrange(3), fails_at) if rng.random() < often else None
    stop_token_ids: tuple[int, ...] = drawn(tuple(rng.sample(common, rng.randint(1, 4))), ())
    stop: tuple[str, ...] = drawn(tuple(rng.sample([pair, digits, "never"], rng.randint(1, 3))), ())
    changes: dict[str, Any] = {
        "repetition_penalty": drawn(1.5, 1.0),
        "frequency_penalty": drawn(0.5, 0.0),
        "bad_words": ((rng.choice(common), 7),) if rng.random() < often else (),
        "logit_bias": ((rng.choice(common), 2.0),) if rng.random() < often else (),
        "logprobs": rng.choice([0, 1, 2]) if rng.random() < often else None,
        "grammar": grammar,
        "is_grammar_optional": rng.random() < 0.3,
    }
    return Wishes(
        params=msgspec.structs.replace(params, **changes),
        seed=rng.randrange(2**62) if params.temperature else rng.choice([5, None]),
        min_tokens=rng.randint(1, 20) if rng.random() < 0.4 else 0,
        stop=stop,
        shows_stop=rng.random() < 0.5,
        stop_token_ids=stop_token_ids or ((2,) if grammar else ()),
        ignore_eos=rng.random() < 0.7,
        salt=rng.choice(SALTS),
        adapter=rng.choice([""] * 5 + [*ADAPTERS[:2]] * 2 + [BROKEN_ADAPTER]),
        num_prompt_logprobs=rng.choice([None] * 9 + [1]),
    )


def with_stop_string(rng: random.Random, prompt: Sequence[int], max_tokens: int, wishes: Wishes) -> Wishes:
    """Returns wishes with a stop string out of the answer, which is complete just before or behind the least length."""
    if wishes.adapter == BROKEN_ADAPTER:
        return wishes
    number = rng.randint(1, max_tokens)
    min_tokens = min(max_tokens, max(0, number + rng.choice([-1, 0, 0, 1])))
    wishes = replace(wishes, min_tokens=min_tokens, stop=())
    text = "".join(f" {token_id}" for token_id in answer_of(prompt, max_tokens, wishes).token_ids[:number])
    stop = text[-rng.choice([2, 4, 6, 12, len(text)]) :]
    return replace(wishes, stop=(stop,)) if stop.strip() else wishes


def answer_of(prompt: Sequence[int], max_tokens: int, wishes: Wishes, number: int = 0) -> Answer:
    """Returns the answer to a prompt. number: of the sequence among those of the prompt."""
    params = msgspec.structs.replace(wishes.params, seed=((wishes.seed or 0) + number) % 2**63)
    ends = {*wishes.stop_token_ids, *(() if wishes.ignore_eos else (EOS_TOKEN_ID,))}
    state, text = start_state(wishes.adapter), ""
    tokens: list[SampledToken] = []
    token_ids: list[int] = []
    if wishes.adapter == BROKEN_ADAPTER:
        return Answer(tokens, text, "stop", error="internal_error")
    for token_id in prompt:
        state = after(state, token_id)
    while True:
        grammar = b""
        if params.grammar is not None:
            if not grammar_fails(params.grammar, len(tokens)):
                grammar = grammar_digest(params.grammar, token_ids, ends)
            elif not params.is_grammar_optional:
                return Answer(tokens, text, "stop", error="invalid_request")
        banned = ends if len(tokens) < wishes.min_tokens else ()
        history = History(prompt, token_ids, banned, grammar)
        tokens.append(sampled(state, len(prompt) + len(tokens), params, history))
        token_ids.append(token_id := tokens[-1].token_id)
        if token_id in ends:
            is_named = token_id in wishes.stop_token_ids and (wishes.ignore_eos or token_id != EOS_TOKEN_ID)
            return Answer(tokens, text, "stop", token_id if is_named else None)
        num_before, text = len(text), f"{text} {token_id}"
        if len(tokens) > wishes.min_tokens and (found := _first_stop(text, num_before, wishes.stop)) is not None:
            end, stop = found
            return Answer(tokens, text[: end if wishes.shows_stop else end - len(stop)], "stop", stop)
        if len(tokens) == max_tokens:
            return Answer(tokens, text, "length")
        state = after(state, token_id)


def prompt_logprobs_of(prompt: Sequence[int], wishes: Wishes) -> list[TokenLogprobs]:
    """Returns the logprobs of all tokens of a prompt but the first."""
    state, found = start_state(wishes.adapter), list[TokenLogprobs]()
    for token_id, target in itertools.pairwise(prompt):
        state = after(state, token_id)
        found.append(logprobs_of(state, target, wishes.num_prompt_logprobs or 0))
    return found


def _first_stop(text: str, num_before: int, stops: Sequence[str]) -> tuple[int, str] | None:
    """Returns (end, stop string) of the one that ends first behind the first `num_before` characters."""
    found = [(text.find(stop, max(0, num_before + 1 - len(stop))) + len(stop), stop) for stop in stops]
    found = [(end, stop) for end, stop in found if end >= len(stop)]
    return min(found, key=lambda each: (each[0], -len(each[1]))) if found else None
