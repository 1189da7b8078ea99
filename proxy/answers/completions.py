"""Answers of /v1/completions."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import UNSET
from msgspec.structs import replace

from tandem.protocol.messages.sampling import SampledToken
from tandem.proxy.admission.budgets import HeldAnswer
from tandem.proxy.answers.answers import Answers, Choice, CompletionArrays, PromptPart
from tandem.proxy.answers.json_parts import Holes, JsonText, Part, pieces
from tandem.proxy.answers.logprobs import completion_logprobs
from tandem.proxy.api.answer_bodies import CompletionChoice, CompletionLogprobs, CompletionResponse
from tandem.proxy.dispatch.generation import Generation, TextDelta


class EncodedCompletionChoice(Choice):
    def __init__(self, index: int, prompt: PromptPart | None, held: HeldAnswer) -> None:
        super().__init__(index, prompt, held)
        self.logprobs = CompletionArrays(held.grow)

    @property
    def echoed(self) -> list[PromptPart]:
        """The part that repeats the prompt, if there is one. It is empty unless the prompt is echoed."""
        return [] if self.prompt is None else [self.prompt]


class CompletionAnswers(Answers):
    _ID_PREFIX = "cmpl"
    _CHUNK = CompletionResponse

    def __init__(self, generation: Generation, model: str) -> None:
        super().__init__(generation, model)
        self._offsets: dict[int, int] = {}  # characters of the tokens so far, by sequence

    def chunk(self, delta: TextDelta) -> Iterable[bytes]:
        if delta.is_first and self._prompt_of(delta.index) is not None:
            return self._first_chunk(delta)
        if not delta.text and delta.finish_reason is None and not self._shows_tokens:
            return ()
        choice = CompletionChoice(
            delta.index,
            delta.text,
            self._logprobs(delta),
            delta.finish_reason,
            delta.stop_reason,
            self._token_ids(delta.tokens),
        )
        return (self._event([choice], self._chunk_usage(delta.index)),)

    def _first_chunk(self, delta: TextDelta) -> Iterable[bytes]:
        """Returns the event that repeats the prompt, or has its token ids."""
        choice, holes = self._new_choice(delta.index), Holes()
        self._add(choice, delta)
        self._offsets[delta.index] = self._first_offset(choice) + choice.logprobs.num_characters
        return pieces([b"data: ", *self._body([choice], holes, is_whole=False), b"\n\n"])

    def _logprobs(self, delta: TextDelta) -> CompletionLogprobs | None:
        if self._num_top is None:
            return None
        tokens = delta.tokens[: delta.num_shown]
        offset = self._offsets.get(delta.index, 0)
        logprobs, self._offsets[delta.index] = completion_logprobs(
            self._token_text, tokens, self._num_top, offset, delta.begins_text
        )
        return logprobs

    def _new_choice(self, index: int) -> EncodedCompletionChoice:
        return EncodedCompletionChoice(index, self._prompt_of(index), self._held)

    def _add_logprobs(self, choice: EncodedCompletionChoice, tokens: list[SampledToken], begins: bool) -> None:
        assert self._num_top is not None
        choice.logprobs.extend(self._token_text, tokens, self._num_top, self._first_offset(choice), begins)

    def _first_offset(self, choice: EncodedCompletionChoice) -> int:
        """Returns the characters of an echoed prompt's tokens."""
        return sum(part.logprobs.num_characters for part in choice.echoed)

    def _whole(self, choices: list[EncodedCompletionChoice]) -> list[Part]:
        return self._body(choices, Holes(), is_whole=True)

    def _body(self, choices: list[EncodedCompletionChoice], holes: Holes, is_whole: bool) -> list[Part]:
        usage = self._usage() if is_whole else self._chunk_usage(choices[0].index)
        shown = [self._choice(choice, holes, is_whole) for choice in choices]
        answer = CompletionResponse(self._id, self._generation.created, self._model, shown, usage)
        if is_whole:
            answer = replace(answer, service_tier=None, system_fingerprint=None)
        return holes.fill(answer)

    def _choice(self, choice: EncodedCompletionChoice, holes: Holes, is_whole: bool) -> CompletionChoice:
        texts: list[JsonText] = [*(part.text for part in choice.echoed), choice.text]
        return CompletionChoice(
            choice.index,
            holes.text(*texts),
            self._logprobs_hole(choice, holes),
            choice.finish_reason,
            choice.stop_reason,
            self._token_id_hole(choice, holes),
            self._prompt_logprobs_hole(choice.prompt, holes) if is_whole else UNSET,
            self._prompt_id_hole(choice.prompt, holes),
        )

    def _logprobs_hole(self, choice: EncodedCompletionChoice, holes: Holes) -> CompletionLogprobs | None:
        if self._num_top is None:
            return None
        arrays = [*(part.logprobs for part in choice.echoed), choice.logprobs]
        return CompletionLogprobs(
            holes.array(*(each.tokens for each in arrays)),
            holes.array(*(each.token_logprobs for each in arrays)),
            holes.array(*(each.top_logprobs for each in arrays)),
            holes.array(*(each.text_offset for each in arrays)),
        )
