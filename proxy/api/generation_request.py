"""One request for generation after validation, as the rest of the proxy uses it."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Literal

import msgspec

from tandem.protocol.messages.packed import MAX_PROMPT_LOGPROBS_BYTES, max_packed_bytes
from tandem.protocol.messages.sampling import Pooling, SamplingParams, StopConditions
from tandem.proxy.admission.budgets import MAX_ANSWER_BYTES, answer_too_large
from tandem.proxy.api.request_settings import RequestSettings
from tandem.proxy.api.responses_api.responses_request import ResponseOptions
from tandem.proxy.api.structured_output import FreeReason, OutputGrammar
from tandem.proxy.cluster.adapter_table import NamedAdapter
from tandem.proxy.cluster.worker_record import ModelLimits
from tandem.proxy.media.media_lease import MediaLease
from tandem.proxy.parsers.reasoning import ReasoningFormat
from tandem.proxy.parsers.tool_formats import ToolFormat
from tandem.proxy.text.prompt import AnyPrompt, CompletionPrompt, ContextLengthExceeded
from tandem.proxy.text.rendering import check_prompt_length
from tandem.runtime.errors import InvalidRequest

ALL_LOGPROBS = 2**31 - 1
"""Number of top tokens that stands for all tokens of the vocabulary until `with_vocabulary` has replaced it."""
_TOKEN_ID_BYTES = 6
_ECHO_BYTES, _LOGPROBS_BYTES, _TOP_LOGPROB_BYTES, _PROMPT_LOGPROB_BYTES = 5, 80, 28, 80
"""Usual sizes, in JSON, of an echoed token, of its logprobs, of each top token in them, and of each token in
prompt_logprobs."""


class EmbeddingOptions(msgspec.Struct, frozen=True):
    """dimensions: None for all."""

    pooling: Pooling
    normalize: bool
    dimensions: int | None
    as_base64: bool


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A checked request for a completion, a chat or embeddings."""

    prompt: AnyPrompt
    max_tokens: int | None
    """None means `default_max_tokens`, or as many as fit if that is None too."""
    max_tokens_param: str
    """Field of the body that max_tokens comes from, for errors."""
    base_sampling: SamplingParams
    """Sampling parameters without a seed; without the grammar too until `output_grammar` has been checked."""
    default_max_tokens: int | None = None
    stop: list[str] = []
    ignore_eos: bool = False
    num_prompt_logprobs: int | None = None
    """Number of top tokens to request from prefill; an echo with logprobs needs them too."""
    is_prompt_only: bool = False
    """Whether nothing is to be generated. max_tokens is 1 then, because workers generate at least one token."""
    output_grammar: OutputGrammar | None = None
    """What the answer should follow; None once `base_sampling` has the grammar."""
    num_free_tools: dict[FreeReason, int] = {}
    """Tools whose arguments may be any object although they have a schema."""
    grammar_param: str = ""
    """Field of the body that the grammar comes from, for errors."""
    tool_format: ToolFormat | None = None
    """How the answer writes tool calls; None if it may contain none."""
    has_short_call_ids: bool = False
    """Whether the answer's calls get ids of nine letters and digits, which the chat template demands."""
    reasoning: ReasoningFormat | None = None
    """How the model writes its thinking; None if it is not separated from the answer."""
    skip_special_tokens: bool = True
    include_usage: bool = False
    continuous_usage: bool = False
    media_lease: MediaLease | None = None
    """Keeps the prompt's media in the cache. The owner of the request calls `release_media`."""
    is_chat: bool = False
    """Whether the answer has messages."""
    role: str = "assistant"
    """Role of the answer to a chat."""
    prefix: str = ""
    """Text of the chat's last message if the answer begins with it."""
    adapter: NamedAdapter | None = None
    """LoRA adapter that the request names as its model."""
    embedding: EmbeddingOptions | None = None
    """Set if embeddings are wanted instead of text."""
    response: ResponseOptions | None = None
    """Set for the Responses API."""
    custom_tools: list[str] = []
    """Names of the functions that stand for custom tools."""
    begins_thinking: list[bool] = []
    """For each prompt, whether it ends with the opening of the thinking; empty before tokenising."""

    # As in the body of the request, where null means these defaults:
    n: int = 1
    seed: int | None = None
    """Seed of the first of the n sequences of a prompt; None draws one."""
    stop_token_ids: list[int] = []
    min_tokens: int = 0
    prompt_logprobs: int | None = None
    """Number of top tokens to return per prompt token."""
    echo: bool = False
    bad_words: list[str] = []
    """Added to `base_sampling` once they are tokenised."""
    priority: int = 0
    """Lower values are served first."""
    request_id: str = ""
    """Empty if the client sent none."""
    timeout: float | None = None
    """Seconds from arrival to the last token; None means the server's limit."""
    return_tokens_as_token_ids: bool = False
    include_stop_str_in_output: bool = False
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] = "left"
    use_beam_search: bool = False
    length_penalty: float = 1.0
    cache_salt: str = ""
    stream: bool = False
    return_token_ids: bool = False
    include_reasoning: bool = True
    thinking_token_budget: int | None = None

    @property
    def is_parsed(self) -> bool:
        """Whether the text has parts besides the answer."""
        return self.tool_format is not None or self.reasoning is not None

    def release_media(self) -> None:
        """Ends the lease of the prompt's media, if there is one. Idempotent."""
        if self.media_lease is not None:
            self.media_lease.release()

    def release_pixels(self) -> None:
        """Releases the pixels of the prompt's media, which are encoded. Another attempt has them made again."""
        if self.media_lease is not None:
            self.media_lease.release_pixels()

    def with_vocabulary(self, vocab_size: int, settings: RequestSettings) -> GenerationRequest:
        """Returns the request with the vocabulary's size for ALL_LOGPROBS. Raises InvalidRequest."""
        numbers = (self.base_sampling.logprobs, self.prompt_logprobs, self.num_prompt_logprobs)
        if ALL_LOGPROBS not in numbers:
            return self
        if vocab_size > (limit := settings.max_logprobs) != -1:
            raise InvalidRequest(
                f"-1 asks for the log-probabilities of all {vocab_size} tokens, but this server's limit is {limit} "
                "(--max-logprobs).",
                "prompt_logprobs" if self.prompt_logprobs == ALL_LOGPROBS else "logprobs",
            )
        logprobs, prompt_logprobs, num_prompt_logprobs = (n if n is None else min(n, vocab_size) for n in numbers)
        return msgspec.structs.replace(
            self,
            base_sampling=msgspec.structs.replace(self.base_sampling, logprobs=logprobs),
            prompt_logprobs=prompt_logprobs,
            num_prompt_logprobs=num_prompt_logprobs,
        )

    def samplings(self) -> list[SamplingParams]:
        """Returns the sampling parameters of the n sequences of one prompt, with seeds in [0, 2**63)."""
        first = secrets.randbits(63) if self.seed is None else self.seed
        return [msgspec.structs.replace(self.base_sampling, seed=(first + i) % 2**63) for i in range(self.n)]

    def named_stop_token_ids(self, eos_token_ids: frozenset[int]) -> frozenset[int]:
        """Returns the client's stop tokens without those that end sequences anyway."""
        return frozenset(self.stop_token_ids) - (frozenset() if self.ignore_eos else eos_token_ids)

    def check_vocabulary(self, limits: ModelLimits) -> None:
        """Raises InvalidRequest if a field names a token that the model does not have."""
        sampling = self.base_sampling
        for param, token_ids in (
            ("logit_bias", [token_id for token_id, _ in sampling.logit_bias]),
            ("allowed_token_ids", sampling.allowed_token_ids),
            ("logprob_token_ids", sampling.logprob_token_ids),
        ):
            largest = max(token_ids, default=0)
            if largest >= limits.vocab_size:
                raise InvalidRequest(f"{param} must have token ids below {limits.vocab_size}, not {largest}.", param)

    def check_answer_size(self, num_tokens: Sequence[int]) -> None:
        """Raises InvalidRequest if what the answer repeats of the prompts would be too large.

        num_tokens: of each prompt. `prompt` must still be what the client sent, which tells how often it is repeated.
        """
        num_top = self.num_prompt_logprobs
        if num_top is not None and max_packed_bytes(longest := max(num_tokens), num_top) > MAX_PROMPT_LOGPROBS_BYTES:
            raise InvalidRequest(
                f"The prompt has {longest} tokens, too many for {num_top} log-probabilities of each: at most "
                f"{MAX_PROMPT_LOGPROBS_BYTES // max_packed_bytes(1, num_top)} tokens are possible. Shorten the prompt "
                "or ask for fewer log-probabilities.",
                "logprobs" if self.prompt_logprobs is None else "prompt_logprobs",
            )
        num_choices = self.n if isinstance(self.prompt, CompletionPrompt) else 1  # a chat repeats its prompt once
        if num_choices * sum(num_tokens) * self._num_repeated_bytes() > MAX_ANSWER_BYTES:
            raise answer_too_large(MAX_ANSWER_BYTES)

    def num_held_bytes(self, num_tokens: int) -> int:
        """Estimates the memory of what the answer repeats of the prompts. num_tokens: of all prompts."""
        num_packed = 0 if self.num_prompt_logprobs is None else max_packed_bytes(num_tokens, self.num_prompt_logprobs)
        return num_packed + num_tokens * self._num_repeated_bytes()

    def _num_repeated_bytes(self) -> int:
        """Estimates the size of what one choice repeats of each prompt token."""
        num_bytes = _TOKEN_ID_BYTES if self.return_token_ids else 0
        if self.echo:
            num_bytes += _ECHO_BYTES
            if self.base_sampling.logprobs is not None:
                num_bytes += _LOGPROBS_BYTES + _TOP_LOGPROB_BYTES * self.base_sampling.logprobs
        if self.prompt_logprobs is not None:
            num_bytes += _PROMPT_LOGPROB_BYTES * (1 + self.prompt_logprobs)
        return num_bytes

    def max_prompt_tokens(self, limits: ModelLimits) -> int | None:
        """Returns the length to which longer prompts are truncated; None refuses prompts that do not fit."""
        if self.truncate_prompt_tokens == -1:
            return max(1, limits.max_model_len - (self.max_tokens or 1))
        return self.truncate_prompt_tokens

    def stop_conditions(
        self, num_prompt_tokens: int, limits: ModelLimits, eos_token_ids: frozenset[int]
    ) -> StopConditions:
        """Raises ContextLengthExceeded if prompt and max_tokens together exceed the model's limit."""
        # Checked when the prompt was rendered, but a worker with a lower limit may have joined since.
        check_prompt_length(num_prompt_tokens, limits, self.max_tokens_param)
        room = limits.max_model_len - num_prompt_tokens
        if self.max_tokens is not None and self.max_tokens > room:
            raise ContextLengthExceeded(
                f"The prompt has {num_prompt_tokens} tokens and {self.max_tokens_param} is {self.max_tokens}, together "
                f"{num_prompt_tokens + self.max_tokens}, but this model's maximum context length is "
                f"{limits.max_model_len} tokens.",
                self.max_tokens_param,
            )
        max_tokens = self.max_tokens or min(room, self.default_max_tokens or room)
        stop_token_ids = frozenset(self.stop_token_ids) | (frozenset() if self.ignore_eos else eos_token_ids)
        if self.base_sampling.grammar is not None and not stop_token_ids:
            raise InvalidRequest(
                f"{self.grammar_param} needs a token that ends the answer, but this model has no end-of-sequence "
                "token; give one in stop_token_ids.",
                self.grammar_param,
            )
        return StopConditions(max_tokens, stop_token_ids, self.min_tokens)
