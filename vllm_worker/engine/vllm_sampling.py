"""Translates sampling parameters into vLLM's, and its tokens and log-probabilities back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.sampling_params import SamplingParams as VllmSampling

from tandem.protocol.messages.dispatch import PromptMessage, StartPrefill
from tandem.protocol.messages.packed import pack_logprobs
from tandem.protocol.messages.sampling import SampledToken, TokenLogprobs
from tandem.runtime.errors import InvalidRequest
from tandem.vllm_worker.engine.sampling_limits import banned_tokens
from tandem.vllm_worker.extensions.worker_extension import OUTPUT

CONSTRAINT = "tandem_constraint"
"""Name in vLLM's extra arguments of what `vllm_grammars.Constraint` is made of: sampling parameters and the stop."""
_MIN_TEMPERATURE = 1e-2
"""vLLM raises lower temperatures to this, with a warning for each."""


def wants_prompt_logprobs(message: PromptMessage, number: int, num_generated: int) -> bool:
    """Whether a sequence reports the log-probabilities of the prompt: the first one, and before it generates.

    vLLM's engine ends if a chunk ends between the prompt and generated tokens.
    """
    return _num_prompt_logprobs(message, number, num_generated) is not None


def _num_prompt_logprobs(message: PromptMessage, number: int, num_generated: int) -> int | None:
    is_first = not number and not num_generated
    return message.num_prompt_logprobs if isinstance(message, StartPrefill) and is_first else None


def vllm_sampling(
    message: PromptMessage,
    number: int,
    generated: list[int],
    max_tokens: int,
    vocab_size: int,
    kv_params: dict[str, Any],
    speculates: bool = False,
) -> VllmSampling:
    """Returns the parameters of one sequence. Tokens beyond the vocabulary are left out: they would end the engine.

    number: of the sequence among those that share the prompt. generated: tokens of earlier attempts. max_tokens: also
    counts these. speculates: whether vLLM decodes speculatively, without biases. Raises InvalidRequest if no token may
    be sampled.
    """
    given = message.sampling

    def known(token_ids: Iterable[int]) -> list[int]:
        return [token_id for token_id in token_ids if token_id < vocab_size]

    def limited(num_top: int | None) -> int | None:
        return None if num_top is None else min(num_top, vocab_size)

    allowed, named, stop_token_ids = map(
        known, (given.allowed_token_ids, given.logprob_token_ids, sorted(message.stop.stop_token_ids))
    )
    num_prompt_logprobs = limited(_num_prompt_logprobs(message, number, len(generated)))
    if given.allowed_token_ids and not allowed:
        raise InvalidRequest(f"allowed_token_ids has no token id below {vocab_size}")
    if max(given.forced_token_ids, default=0) >= vocab_size:
        raise InvalidRequest("the model's vocabulary lacks the tokens that end its thinking", "thinking_token_budget")
    bias = {token_id: bias for token_id, bias in given.logit_bias if token_id < vocab_size}
    # vLLM's first model runner looks for bad words one by one in each step, and adds a bias to all sequences at once.
    biased = [] if speculates else known(banned_tokens(given))
    bias |= dict.fromkeys(biased, float("-inf"))
    # vLLM asks for a mask where there is a grammar, whatever is in it. It would not end a sequence before min_tokens,
    # where the grammar may allow nothing but the end.
    is_constrained = given.grammar is not None or bool(given.forced_token_ids)
    words = [list(word) for word in given.bad_words if max(word) < vocab_size and (len(word) > 1 or speculates)]
    params = VllmSampling(
        temperature=max(given.temperature, _MIN_TEMPERATURE) if given.temperature else 0.0,
        top_p=given.top_p,
        top_k=given.top_k,
        min_p=given.min_p,
        repetition_penalty=given.repetition_penalty,
        presence_penalty=given.presence_penalty,
        frequency_penalty=given.frequency_penalty,
        seed=message.seeds[number] & (2**63 - 1),
        logit_bias=bias or None,
        allowed_token_ids=allowed or None,
        logprobs=limited(given.logprobs) if not named else None,
        logprob_token_ids=named or None,
        prompt_logprobs=num_prompt_logprobs,
        structured_outputs=StructuredOutputsParams(grammar=given.grammar or "") if is_constrained else None,
        max_tokens=max_tokens,
        min_tokens=min(message.stop.min_tokens, max_tokens) if not is_constrained else 0,
        stop_token_ids=stop_token_ids,
        ignore_eos=True,  # the proxy has put the model's end tokens among the stop tokens
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        extra_args={
            "kv_transfer_params": kv_params or None,
            OUTPUT: generated,
            CONSTRAINT: (given, message.stop),
        },
        skip_clone=True,
    )
    # What vLLM's input processor would do with a tokeniser, which runs in the proxy here.
    params._bad_words_token_ids = words or None
    params._all_stop_token_ids = set(stop_token_ids)
    return params


def sampled_tokens(token_ids: list[int], logprobs: Any) -> Iterator[SampledToken]:
    """Yields the tokens of one output. logprobs: vLLM's LogprobsLists, or None."""
    for number, token_id in enumerate(token_ids):
        if logprobs is None:
            yield SampledToken(token_id)
            continue
        ids, values = logprobs.logprob_token_ids[number], logprobs.logprobs[number]
        rank = int(logprobs.sampled_token_ranks[number])
        yield SampledToken(token_id, token_logprobs(ids.tolist(), values.tolist(), rank))


def prompt_logprobs(tensors: Any) -> list[bytes] | None:
    """Returns what a prompt's LogprobsTensors say of its tokens but the first, packed; None without."""
    if tensors is None:
        return None
    ids, values, ranks = tensors.logprob_token_ids, tensors.logprobs, tensors.selected_token_ranks
    rows = zip(ids.tolist(), values.tolist(), ranks.tolist(), strict=True)
    return pack_logprobs([token_logprobs(row_ids, row_values, int(rank)) for row_ids, row_values, rank in rows])


def token_logprobs(ids: list[int], values: list[float], rank: int) -> TokenLogprobs:
    """ids, values: of the token itself, then of the top tokens."""
    return TokenLogprobs(values[0], rank, list(zip(ids[1:], values[1:], strict=True)))
