"""Validation of bodies: every error names the field, and both numbers if there are two."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.protocol.messages.sampling import SamplingParams
from tandem.proxy.answers.errors import error_body, status_of
from tandem.proxy.api.generation_request import GenerationRequest
from tandem.proxy.api.request_settings import RequestSettings
from tandem.proxy.api.validation import BodyDecoder, ModelFormats
from tandem.proxy.cluster.worker_record import ModelLimits
from tandem.proxy.text.model_text import SamplingDefaults
from tandem.proxy.text.prompt import ChatPrompt, ContextLengthExceeded
from tandem.proxy.text.rendering import check_prompt_length, split_prompt
from tandem.runtime.errors import InvalidRequest

DECODER = BodyDecoder("tiny")
LIMITS = ModelLimits(max_model_len=2048, vocab_size=1000)
EOS = frozenset({2})


def completion(**fields: Any) -> GenerationRequest:
    return DECODER.completion(json.dumps({"model": "tiny", "prompt": "hi", **fields}).encode())


def chat(content: Any = "hi", **fields: Any) -> GenerationRequest:
    messages = [{"role": "user", "content": content}]
    return DECODER.chat(json.dumps({"model": "tiny", "messages": messages, **fields}).encode())


def test_defaults() -> None:
    request = completion()
    assert request.stop_conditions(10, LIMITS, EOS).max_tokens == 16
    assert request.stop_conditions(10, LIMITS, EOS).stop_token_ids == EOS
    assert request.stop_conditions(2040, LIMITS, EOS).max_tokens == 8, "a default shrinks to what fits"
    assert chat().stop_conditions(10, LIMITS, EOS).max_tokens == 2038, "chat takes all that fits"
    [sampling] = request.samplings()
    assert sampling == SamplingParams(seed=sampling.seed)
    assert 0 <= sampling.seed < 2**63 and sampling.seed != request.samplings()[0].seed


def test_seeds_of_n_sequences() -> None:
    request = completion(n=3, seed=7)
    assert [sampling.seed for sampling in request.samplings()] == [7, 8, 9]
    assert completion(seed=-1).samplings()[0].seed == 2**63 - 1


def test_sampling_fields_reach_the_workers() -> None:
    request = completion(
        temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, repetition_penalty=1.2, presence_penalty=-1,
        frequency_penalty=2, logit_bias={"3": -100, "12": 5.5}, seed=1, logprobs=4, min_tokens=2, cache_salt="me",
    )  # fmt: skip
    assert request.samplings() == [
        SamplingParams(0.5, 0.9, 7, 0.1, 1.2, -1.0, 2.0, ((3, -100.0), (12, 5.5)), seed=1, logprobs=4)
    ]
    stop = request.stop_conditions(1, LIMITS, EOS)
    assert stop.banned(1) == EOS and not stop.banned(2)
    assert request.cache_salt == "me"
    with pytest.raises(InvalidRequest, match="below"):
        completion(logit_bias={str(LIMITS.vocab_size): 1}).check_vocabulary(LIMITS)


def test_number_of_prompt_logprobs() -> None:
    assert completion(logprobs=3).num_prompt_logprobs is None
    assert completion(logprobs=3, echo=True).num_prompt_logprobs == 3
    assert completion(logprobs=3, echo=True, prompt_logprobs=5).num_prompt_logprobs == 5
    assert completion(echo=True).num_prompt_logprobs is None
    assert chat(prompt_logprobs=0).num_prompt_logprobs == 0
    assert chat(logprobs=True).base_sampling.logprobs == 0
    assert chat(logprobs=True, top_logprobs=2).base_sampling.logprobs == 2


def test_truncation() -> None:
    assert completion().max_prompt_tokens(LIMITS) is None
    assert completion(truncate_prompt_tokens=9).max_prompt_tokens(LIMITS) == 9
    assert completion(truncate_prompt_tokens=-1, max_tokens=48).max_prompt_tokens(LIMITS) == LIMITS.max_model_len - 48


def test_stop_conditions() -> None:
    request = completion(stop="a", stop_token_ids=[5], ignore_eos=True)
    assert request.stop == ["a"]
    assert request.stop_conditions(1, LIMITS, EOS).stop_token_ids == frozenset({5})


def test_a_prompt_that_no_longer_fits_is_refused() -> None:
    """Workers with a lower limit may join while a request is read."""
    with pytest.raises(ContextLengthExceeded, match="maximum context length is 2048"):
        chat().stop_conditions(LIMITS.max_model_len, LIMITS, EOS)


def test_chat_limits_and_parts() -> None:
    request = chat(
        [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], max_completion_tokens=5, max_tokens=9
    )
    assert request.max_tokens == 5
    assert isinstance(request.prompt, ChatPrompt)
    assert request.prompt.messages == [{"role": "user", "content": "a\nb"}]


NEUTRAL: list[dict[str, Any]] = [
    {"logprobs": None},
    {"logprobs": False},
    {"echo": False},
    {"presence_penalty": 0, "frequency_penalty": 0.0},
    {"repetition_penalty": 1.0},
    {"best_of": 1, "n": None},
    {"tools": [], "tool_choice": "none"},
    {"response_format": {"type": "text"}},
    {"user": "me", "an_unknown_field": {"x": 1}},
    {"top_k": -1, "min_p": 0, "logit_bias": {}},
    {"max_tokens": None, "temperature": None, "stop": None, "stream": None},
]


@pytest.mark.parametrize("fields", NEUTRAL, ids=str)
def test_neutral_values_are_accepted(fields: dict[str, Any]) -> None:
    completion(**fields)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -3}, "max_tokens"),
    ({"max_tokens": "many"}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 1.01}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"seed": 2**63}, "seed"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a"] * 257}, "stop"),
    ({"stop": ["a" * 1000] * 17}, "stop"),
    ({"stop": 5}, "stop"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"logprobs": -2}, "logprobs"),
    ({"logprobs": 21}, "logprobs"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"frequency_penalty": -2.5}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"min_p": 1.5}, "min_p"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"min_tokens": 3, "max_tokens": 2}, "min_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"best_of": 2}, "best_of"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"bad_words": [""]}, "bad_words[0]"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"priority": 101}, "priority"),
    ({"request_id": "with space"}, "request_id"),
    ({"suffix": "b"}, "suffix"),
    ({"n": 1.5}, "n"),
    ({"n": "4"}, "n"),
    ({"n": 129.0}, "n"),
    ({"stop_token_ids": [1.0, 1.5]}, "stop_token_ids[1]"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=str)
def test_unsupported_values_are_refused_with_the_field_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        completion(**fields)
    assert caught.value.param == param
    assert status_of(caught.value) == 400
    body = json.loads(error_body(caught.value))["error"]
    assert set(body) == {"message", "type", "param", "code"} and body["param"] == param


def test_unknown_model_is_404() -> None:
    with pytest.raises(InvalidRequest) as caught:
        completion(model="gpt-4")
    assert (status_of(caught.value), caught.value.code, caught.value.param) == (404, "model_not_found", "model")


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b'{"prompt"}', b"\xff\xfe", b'{"prompt": "a"} x', b"[" * 99999]
)
def test_invalid_bodies_are_refused(body: bytes) -> None:
    for decode in (DECODER.completion, DECODER.chat):
        with pytest.raises(InvalidRequest):
            decode(body)


def test_missing_fields_are_named() -> None:
    for decode, param in ((DECODER.completion, "prompt"), (DECODER.chat, "messages")):
        with pytest.raises(InvalidRequest) as caught:
            decode(b"{}")
        assert caught.value.param == param


@pytest.mark.parametrize(
    "content",
    [[{"type": "image_url", "image_url": {"url": "data:"}}], None, 5, [5], [{}]],
)
def test_chat_content_that_is_not_text(content: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(content)
    assert str(caught.value.param).startswith("messages[0]") or str(caught.value.param).startswith("messages")


def test_an_echo_of_a_chat_repeats_the_last_message_of_the_answers_role() -> None:
    def echoed(messages: list[dict[str, Any]], **fields: Any) -> tuple[str, str]:
        body = json.dumps({"messages": messages, "echo": True, **fields}).encode()
        request = DECODER.chat(body)
        return request.role, request.prefix

    asked = {"role": "user", "content": "Hi"}
    begun = {"role": "assistant", "content": [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]}
    assert echoed([asked]) == ("assistant", "")
    assert echoed([asked, begun], continue_final_message=True) == ("assistant", "A\nB")
    assert echoed([asked], add_generation_prompt=False) == ("user", "Hi")
    assert echoed([asked, begun], continue_final_message=True, echo=False)[1] == ""


WRONG_VALUES: list[tuple[dict[str, Any], str]] = [
    ({"seed": 2**63}, "seed is 9223372036854775808: .* <= 9223372036854775807 .less_than_equal"),
    ({"seed": -(2**63) - 1}, "seed is -9223372036854775809: .* .greater_than_equal"),
    ({"temperature": 2.5}, "temperature is 2.5: .* <= 2.0"),
    ({"max_tokens": "many"}, 'max_tokens is "many": Expected .* got `str`'),
    ({"stop": ["a", ""]}, r"stop\[1\] is \"\": "),
    ({"logit_bias": {"not_a_token_id": 1}}, r"logit_bias is \{\"not_a_token_id\":1\}: Expected .* matching regex"),
    ({"logit_bias": {"1": "heavy"}}, r'logit_bias is \{"1":"heavy"\}: Expected `float`'),
    ({"model": 7 * [{"a": "b" * 50}]}, r"model is \[.{79}\.\.\.: Expected"),
    ({"truncation_side": "middle"}, 'truncation_side is "middle": '),
    ({"logprob_token_ids": [-1]}, r"logprob_token_ids\[0\] is -1: .* >= 0"),
    ({"logprob_token_ids": [1]}, "logprob_token_ids requires logprobs"),
    ({"prompt_logprobs": -2}, "prompt_logprobs is -2: .* >= -1"),
    ({"prompt_logprobs": 21}, "prompt_logprobs is 21, but this server's limit is 20"),
    ({"length_penalty": "long"}, 'length_penalty is "long": '),
    ({"use_beam_search": True, "stream": True}, "stream is true, which is not supported with use_beam_search"),
    ({"use_beam_search": True, "stop": "a"}, 'stop is "a", which is not supported'),
    ({"use_beam_search": True, "thinking_token_budget": 5}, "thinking_token_budget is 5, which is not supported"),
    ({"use_beam_search": True, "echo": True, "logprobs": 1}, "echo with use_beam_search"),
    (
        {"use_beam_search": True, "structured_outputs": {"regex": "a"}},
        "structured_outputs.regex is not supported with use_beam_search",
    ),
]


@pytest.mark.parametrize(("fields", "message"), WRONG_VALUES, ids=str)
def test_errors_quote_the_wrong_value(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        completion(**fields)
    assert str(caught.value.param).startswith(tuple(fields))


def test_all_log_probabilities() -> None:
    unlimited, limit = RequestSettings(max_logprobs=-1), RequestSettings(max_logprobs=1000)
    request = completion(logprobs=-1, echo=True, prompt_logprobs=2).with_vocabulary(1000, unlimited)
    assert (request.base_sampling.logprobs, request.prompt_logprobs, request.num_prompt_logprobs) == (1000, 2, 1000)
    assert chat(logprobs="true", top_logprobs=-1).with_vocabulary(1000, limit).base_sampling.logprobs == 1000
    with pytest.raises(InvalidRequest, match=r"all 1000 tokens, .* limit is 20 \(--max-logprobs\)"):
        chat(prompt_logprobs=-1).with_vocabulary(1000, RequestSettings(max_logprobs=20))
    assert BodyDecoder("tiny", unlimited).completion(b'{"prompt": "a", "logprobs": 500}')


def test_named_log_probabilities() -> None:
    request = chat(logprobs=True, top_logprobs=1, logprob_token_ids=[7, 5, 7])
    assert (request.base_sampling.logprob_token_ids, request.base_sampling.logprobs) == ((7, 5), 3)
    with pytest.raises(InvalidRequest, match="logprob_token_ids must have token ids below 1000, not 1001"):
        chat(logprobs=True, logprob_token_ids=[1001]).check_vocabulary(LIMITS)


def test_continuous_usage_requires_include_usage() -> None:
    both = {"include_usage": True, "continuous_usage_stats": True}
    assert completion(stream=True, stream_options=both).continuous_usage
    assert not completion(stream=True, stream_options=both | {"include_usage": False}).continuous_usage


def test_the_models_defaults_are_for_fields_that_are_left_out() -> None:
    defaults = SamplingDefaults(temperature=0.5, repetition_penalty=1.5, max_new_tokens=7)
    decoder = BodyDecoder("tiny", formats=ModelFormats(sampling=defaults))
    of_chat = decoder.chat(b'{"messages": [{"role": "user", "content": "a"}], "temperature": 0.1}')
    assert (of_chat.base_sampling.temperature, of_chat.base_sampling.repetition_penalty) == (0.1, 1.5)
    assert of_chat.stop_conditions(1, LIMITS, EOS).max_tokens == 7
    assert decoder.completion(b'{"prompt": "a"}').stop_conditions(1, LIMITS, EOS).max_tokens == 16
    assert decoder.completion(b'{"prompt": "a", "use_beam_search": true, "n": 2}').use_beam_search


def test_chat_without_messages() -> None:
    with pytest.raises(InvalidRequest, match=r"messages is \[\]: .* length >= 1"):
        DECODER.chat(b'{"messages": []}')


def test_prompt_shapes() -> None:
    def split(prompt: Any) -> Any:
        return split_prompt(msgspec.Raw(json.dumps(prompt).encode()))

    assert split("a") == ["a"]
    assert split(["a", "b"]) == ["a", "b"]
    assert split([1, 2]) == [[1, 2]]
    assert split([[1], [2, 3]]) == [[1], [2, 3]]
    for refused in ("", [], [[]], ["a", ""], ["a", 1], [1, "a"], [-1], [2**31], [1.5], 5, None, {}, [[1], 2], [True]):
        with pytest.raises(InvalidRequest) as caught:
            split(refused)
        assert caught.value.param == "prompt"


def test_context_length_errors_name_both_numbers() -> None:
    with pytest.raises(InvalidRequest, match=r"5000 tokens > 2047 maximum.* 2048") as caught:
        check_prompt_length(5000, LIMITS, "prompt")
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(InvalidRequest, match=r"2040 tokens and max_tokens is 9, together 2049, .* 2048 tokens"):
        completion(max_tokens=9).stop_conditions(2040, LIMITS, EOS)
    assert completion(max_tokens=8).stop_conditions(2040, LIMITS, EOS).max_tokens == 8


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists, max_leaves=8))
def test_any_value_in_any_field_is_accepted_or_refused(value: Any) -> None:
    for field in ("prompt", "max_tokens", "stop", "temperature", "logprobs", "stream_options", "messages", "n", "seed"):
        for decode in (DECODER.completion, DECODER.chat):
            body = json.dumps({"prompt": "a", "messages": [{"role": "user", "content": "a"}], field: value}).encode()
            with suppress(InvalidRequest):
                decode(body)


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_earlier_thinking_reaches_the_template_under_both_names(name: str) -> None:
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yes", name: "Hm"},
        {"role": "assistant", "content": None, name: "So"},
        {"role": "assistant", "content": None, "tool_calls": calls, name: "Call"},
    ]
    prompt = DECODER.chat(json.dumps({"messages": messages}).encode()).prompt
    assert isinstance(prompt, ChatPrompt)
    shown = [(m.get("reasoning"), m.get("reasoning_content"), m.get("thinking")) for m in prompt.messages]
    assert shown == [(None, None, None), ("Hm", "Hm", None), ("So", "So", None), ("Call", "Call", "Call")]
    with pytest.raises(InvalidRequest, match="reasoning"):
        DECODER.chat(json.dumps({"messages": [{"role": "assistant", "content": "a", name: 5}]}).encode())


@pytest.mark.parametrize("rest", [b'"\x94"', b"[" * 100_000, b"nul", b'"\xed\xa0"'])
def test_a_wrong_field_before_malformed_text_is_refused(rest: bytes) -> None:
    with pytest.raises(InvalidRequest, match="not valid JSON"):
        BodyDecoder("m").completion(b'{"prompt": "a", "max_tokens": "x", "user": ' + rest + b"}")


def test_an_empty_model_is_the_served_one() -> None:
    decoder = BodyDecoder("m")
    turn = [{"role": "user", "content": "a"}]
    for decode, fields in (
        (decoder.chat, {"messages": turn}),
        (decoder.completion, {"prompt": "a"}),
        (decoder.message, {"messages": turn, "max_tokens": 1}),
        (decoder.embedding, {"input": "a"}),
        (lambda body: decoder.response(body, lambda _: []), {"input": "a"}),
    ):
        assert decode(json.dumps({"model": "", **fields}).encode()).adapter is None
