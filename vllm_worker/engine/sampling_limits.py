"""What workers with vLLM's engine refuse, among it long lists of tokens. Pure.

vLLM handles these lists in Python for each sequence, and its second model runner, which GPUs use, has tables of fixed
sizes: a longer list would end the engine in a step.
"""

from __future__ import annotations

from tandem.protocol.messages.dispatch import PromptMessage, StartPrefill
from tandem.protocol.messages.sampling import SamplingParams
from tandem.runtime.errors import InvalidRequest

MAX_ALLOWED_TOKENS = 1024
MAX_BIASED_TOKENS = 1024
"""Bad words of one token count too, because they become a bias."""
MAX_STOP_TOKENS = 128
"""With the end-of-sequence tokens of the model."""
MAX_BAD_WORDS = 128
"""Token sequences. A string of `bad_words` has up to two: one for the start of a text and one for its middle."""
MAX_BAD_WORD_TOKENS = 1024
"""Tokens of all bad words together."""
MAX_ENTRIES = 16_384
"""Entries of all lists, times the sequences of the request."""


def check_supported(message: PromptMessage, speculates: bool = False) -> None:
    """Raises InvalidRequest for what a vLLM worker cannot do, with the way out.

    speculates: whether it decodes speculatively.
    """
    if isinstance(message, StartPrefill) and message.pooling is not None:
        raise InvalidRequest(
            "this worker runs vLLM, whose engine either generates or embeds; for embeddings, start a cluster with "
            "Tandem's engine and this model on another port (tandem up --engine tandem)"
        )
    if speculates:
        check_speculated(message.sampling)
    check_lists(message)
    _check_thinking_budget(message.sampling)


def _check_thinking_budget(sampling: SamplingParams) -> None:
    """Raises InvalidRequest for lists that exclude a token which ends the thinking: vLLM applies them after the mask
    that forces it, so no token would be left."""
    forced = set(sampling.forced_token_ids)
    is_allowed = not sampling.allowed_token_ids or forced <= set(sampling.allowed_token_ids)
    is_banned = any(word[-1] in forced for word in sampling.bad_words)
    for field, excludes in (("allowed_token_ids", not is_allowed), ("bad_words", is_banned)):
        if excludes:
            raise InvalidRequest(
                f"{field} excludes tokens that end the model's thinking ({', '.join(map(str, sorted(forced)))}); "
                "workers with vLLM's engine then take no thinking_token_budget. Leave one out.",
                field,
            )


def check_speculated(sampling: SamplingParams) -> None:
    """Raises InvalidRequest for what vLLM does not apply to drafts: it would be ignored for some tokens."""
    given = {
        "min_p": sampling.min_p > 0,
        "logit_bias": bool(sampling.logit_bias),
        "logprob_token_ids": bool(sampling.logprob_token_ids),
    }
    for param, is_given in given.items():
        if is_given:
            raise InvalidRequest(
                f"{param} cannot be used here: the cluster decodes speculatively (--speculative-config); leave it out",
                param,
            )


def banned_tokens(sampling: SamplingParams) -> list[int]:
    """Returns the bad words of one token."""
    return [word[0] for word in sampling.bad_words if len(word) == 1]


def check_lists(message: PromptMessage) -> None:
    """Raises InvalidRequest for a list that is too long, or for lists that are too long for so many sequences."""
    sampling = message.sampling
    num_biased = len(sampling.logit_bias) + len(banned_tokens(sampling))
    num_word_tokens = sum(map(len, sampling.bad_words))
    limits = (
        ("allowed_token_ids", "token ids in allowed_token_ids", len(sampling.allowed_token_ids), MAX_ALLOWED_TOKENS),
        ("logit_bias", "token ids in logit_bias, with bad_words of one token", num_biased, MAX_BIASED_TOKENS),
        (
            "stop_token_ids",
            "stop tokens, with those that end the model's texts",
            len(message.stop.stop_token_ids),
            MAX_STOP_TOKENS,
        ),
        (
            "bad_words",
            "token sequences that bad_words stand for, up to two for each string",
            len(sampling.bad_words),
            MAX_BAD_WORDS,
        ),
        ("bad_words", "tokens in bad_words", num_word_tokens, MAX_BAD_WORD_TOKENS),
    )
    for param, what, number, limit in limits:
        if number > limit:
            raise InvalidRequest(
                f"The request has {number} {what}; workers with vLLM's engine take at most {limit}.", param
            )
    num_entries = (
        len(sampling.allowed_token_ids)
        + len(sampling.logit_bias)
        + len(message.stop.stop_token_ids)
        + num_word_tokens
        + len(sampling.logprob_token_ids)
    )
    num_sequences = len(message.attempt_ids)
    if num_entries * num_sequences > MAX_ENTRIES:
        raise InvalidRequest(
            f"The request's lists of tokens (allowed_token_ids, logit_bias, stop_token_ids, bad_words and "
            f"logprob_token_ids) have {num_entries} entries for each of {num_sequences} sequences; workers with vLLM's "
            f"engine take at most {MAX_ENTRIES} entries times sequences. Send fewer entries, or a smaller n.",
            "n",
        )
