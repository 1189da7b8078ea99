"""Bodies become tokenised requests; too long prompts are refused early, and the tokeniser keeps no state."""

from __future__ import annotations

import base64
import contextlib
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from tandem.protocol.messages.packed import unpack_token_ids
from tandem.proxy.api.responses_api.responses_request import ResponseRequest
from tandem.proxy.cluster.worker_record import ModelLimits
from tandem.proxy.proxy_config import ProxyConfig
from tandem.proxy.reading.body_reader import BodyKind, BodyReader, reads_files
from tandem.proxy.text.model_text import EmbeddingDefaults, ModelText, SamplingDefaults
from tandem.proxy.text.prompt import ChatPrompt, ContextLengthExceeded, RenderedPrompts, has_token_ids
from tandem.runtime.errors import InvalidRequest, TandemError
from tests.support.settings import proxy_config

LIMITS = ModelLimits(max_model_len=100, vocab_size=500)
CORPUS = ["the quick brown fox jumps over the lazy dog " * 20, "aaaa bbbb cccc dddd" * 20]


class CountingTokenizer:
    """Counts the characters that were given to be tokenised."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.num_characters = 0

    def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
        self.num_characters += sum(map(len, texts))
        return self._tokenizer.encode_batch_fast(texts, **options)

    def get_added_tokens_decoder(self) -> dict[int, Any]:
        return dict(self._tokenizer.get_added_tokens_decoder())

    def to_str(self) -> str:
        return str(self._tokenizer.to_str())


class FakeModelText:
    chat_template = None
    eos_token_ids: frozenset[int] = frozenset()
    sampling_defaults = SamplingDefaults()
    embedding_defaults = EmbeddingDefaults()
    requires_short_call_ids = False

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = CountingTokenizer(tokenizer)
        self.num_token_ids = tokenizer.get_vocab_size()

    def render_chat(self, prompt: ChatPrompt) -> str:
        return "".join(message["content"] for message in prompt.messages) + (
            "|" if prompt.add_generation_prompt else ""
        )


def byte_level(vocab_size: int = 300) -> Tokenizer:
    """Returns a tokeniser like GPT-2's, which keeps every byte."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


TOKENIZER = byte_level()


def reader_and_tokenizer(tokenizer: Tokenizer = TOKENIZER) -> tuple[BodyReader, CountingTokenizer]:
    text = FakeModelText(tokenizer)
    return BodyReader(cast(ModelText, text), ProxyConfig("proxy-0", "", "m", "m")), text.tokenizer


def read(reader: BodyReader, kind: Any = "completion", **fields: Any) -> list[list[int]]:
    request = reader.read(json.dumps(fields).encode(), kind, LIMITS)
    assert isinstance(request.prompt, RenderedPrompts)
    for prompt in request.prompt.prompts:
        assert prompt.num_tokens * 4 == len(prompt.token_ids)
    return [unpack_token_ids(prompt.token_ids) for prompt in request.prompt.prompts]


def test_all_forms_of_prompt() -> None:
    reader, _ = reader_and_tokenizer()
    fox = TOKENIZER.encode("the fox").ids
    assert read(reader, prompt="the fox") == [fox]
    assert read(reader, prompt=["the fox", "a"]) == [fox, TOKENIZER.encode("a").ids]
    assert read(reader, prompt=[1, 2]) == [[1, 2]]
    assert read(reader, prompt=[[1, 2], [3]]) == [[1, 2], [3]]
    chat = read(reader, "chat", messages=[{"role": "user", "content": "the fox"}])
    assert chat == [TOKENIZER.encode("the fox|").ids]


@pytest.mark.parametrize(
    ("prompt", "holds"), [([1], True), ([[1, 2], [3]], True), ("[1]", False), (["1"], False), ([], False)]
)
def test_prompts_of_token_ids_are_recognised(prompt: Any, holds: bool) -> None:
    reader, _ = reader_and_tokenizer()
    assert has_token_ids(reader.decode(json.dumps({"prompt": prompt}, indent=1).encode(), "completion").prompt) == holds


def test_a_prompt_that_cannot_fit_is_refused_before_it_is_tokenised_whole() -> None:
    reader, counting = reader_and_tokenizer(normalized())
    for fields in ({"prompt": "xyzzy" * 10_000}, {"prompt": ["xyzzy" * 10_000, "a"]}):
        counting.num_characters = 0
        with pytest.raises(ContextLengthExceeded, match="prompt is too long: about 50000 tokens > 99 maximum"):
            read(reader, **fields)
        assert counting.num_characters == 500
    with pytest.raises(
        ContextLengthExceeded, match=r"prompt is too long: 100 tokens > 99 maximum.*maximum context length is 100 "
    ):
        read(reader, prompt="x" * 100)
    with pytest.raises(ContextLengthExceeded, match=r"101 tokens > 99 maximum"):
        read(reader, prompt=[1] * 101)


def test_a_long_text_of_few_tokens_still_fits() -> None:
    """If the tokeniser drops text, the number of characters is no proof, and probing must not refuse."""
    reader, counting = reader_and_tokenizer(normalized())
    assert len(read(reader, prompt="~" * 5000 + "the fox")[0]) == len(TOKENIZER.encode("the fox").ids)
    assert counting.num_characters < 2 * 5007, "probing costs half more at most"


def test_truncation_keeps_the_end() -> None:
    reader, _ = reader_and_tokenizer()
    whole = TOKENIZER.encode("the quick brown fox " * 400).ids
    assert read(reader, prompt="the quick brown fox " * 400, truncate_prompt_tokens=7) == [whole[-7:]]
    assert read(reader, prompt=whole, truncate_prompt_tokens=7) == [whole[-7:]]
    assert read(reader, prompt=whole, truncate_prompt_tokens=-1, max_tokens=1) == [whole[-99:]]


def test_mixed_truncation_on_threads_never_fails() -> None:
    """The tokeniser's own truncation would be state that threads share."""
    reader, _ = reader_and_tokenizer()
    text = "the quick brown fox " * 12
    whole = TOKENIZER.encode(text).ids
    wanted = [None, 1, 3, 20, None, 50, -1] * 60

    def one(truncate: int | None) -> bool:
        [got] = read(reader, prompt=text, max_tokens=1, truncate_prompt_tokens=truncate)
        return got == whole[-(99 if truncate == -1 else truncate or len(whole)) :]

    assert len(whole) < 99
    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(one, wanted))
    assert TOKENIZER.truncation is None and TOKENIZER.padding is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": [500]}, "Token id 500 is out of range"),
        ({"prompt": ""}, "empty"),
        ({"prompt": []}, "empty"),
        ({"prompt": ["a", ""]}, "empty"),
        ({"prompt": {"a": 1}}, "prompt must be"),
    ],
)
def test_invalid_prompts_are_refused(fields: dict[str, Any], message: str) -> None:
    reader, _ = reader_and_tokenizer()
    with pytest.raises(InvalidRequest, match=message):
        read(reader, **fields)


def normalized() -> Tokenizer:
    tokenizer = Tokenizer.from_str(TOKENIZER.to_str())
    tokenizer.normalizer = normalizers.Replace("~", "")
    return tokenizer


@given(junk=st.binary(min_size=1, max_size=5), place=st.integers(0, 200), kind=st.sampled_from(["completion", "chat"]))
def test_a_body_with_damaged_bytes_is_read_or_refused(junk: bytes, place: int, kind: Any) -> None:
    """Including bytes that are not UTF-8."""
    reader, _ = reader_and_tokenizer()
    prompt = {"prompt": "hello"} if kind == "completion" else {"messages": [{"role": "user", "content": "hello"}]}
    body = bytearray(json.dumps({"model": "m", "max_tokens": 2, "stop": ["a"], "user": "u", **prompt}).encode())
    body[place % len(body) : place % len(body) + len(junk)] = junk
    with contextlib.suppress(TandemError):
        reader.read(bytes(body), kind, LIMITS)
    with pytest.raises(InvalidRequest, match="prompt"):
        reader.read(b'{"model": "m", "prompt": "a\x92b"}', "completion", LIMITS)


@given(st.binary(max_size=200))
def test_any_body_is_read_or_refused(body: bytes) -> None:
    reader, _ = reader_and_tokenizer()
    for kind in ("completion", "chat"):
        with pytest.raises(TandemError):
            reader.read(body, cast(Any, kind), LIMITS)


@pytest.mark.parametrize(
    ("kind", "body", "expected"),
    [
        ("response", b'{"input": "a", "previous_response_id": "r"}', True),
        ("response", b'{"input": "a", "previous\\u005fresponse_id": "r"}', True),
        ("response", b'{"input": "a\\n"}', False),
        ("chat", b'{"previous_response_id": "r"}', False),
    ],
)
def test_stored_responses_are_not_read_on_the_loop(kind: Any, body: bytes, expected: bool) -> None:
    assert reads_files(kind, body) is expected
    if expected:
        assert msgspec.json.decode(body, type=ResponseRequest).previous_response_id == "r"


def test_images_are_written_at_their_places_whatever_a_process_that_died_has_left(tmp_path: Path) -> None:
    config = ProxyConfig("proxy-0", "", "m", "m", media_cache_endpoint="ipc://nobody")
    reader = BodyReader(cast(ModelText, FakeModelText(TOKENIZER)), config)
    images = [b"first", b"the second"]
    urls = [f"data:image/png;base64,{base64.b64encode(image).decode()}" for image in images]
    content = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    body = json.dumps({"messages": [{"role": "user", "content": content}]}).encode()
    file = tmp_path / "items"
    file.write_bytes(b"first, the sec")
    found = reader.find_media(body, "chat", "", str(file)).items
    written = file.read_bytes()
    assert [written[item.offset : item.offset + (item.num_bytes or 0)] for item in found] == images
    assert len(written) == sum(map(len, images))


NESTED = '{"items": ' * 200_000 + "{}" + "}" * 200_000
"""Deeper than any version of Python reads."""
NESTED_CALL = (
    b'{"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": %s}}]}]}'
    % NESTED.encode()
)


@pytest.mark.parametrize(
    "body",
    [
        NESTED_CALL,
        json.dumps({"messages": [{"role": "user", "content": "a"}], "structured_outputs": {"json": NESTED}}).encode(),
    ],
)
def test_values_that_are_nested_too_deeply_are_refused(body: bytes) -> None:
    reader, _ = reader_and_tokenizer()
    with pytest.raises(InvalidRequest, match=r"nested too deeply|recursion"):
        reader.read(body, "chat", LIMITS)
    if b"tool_calls" in body:
        with pytest.raises(InvalidRequest, match=r"nested too deeply|recursion"):
            reader.tokenize(body, 100)


@pytest.mark.parametrize(("soonest", "counts"), [(0, (0, 0, 7)), (-5, (-5, -3, 7))])
def test_no_client_goes_before_others_unless_the_operator_allows_it(soonest: int, counts: tuple[int, ...]) -> None:
    text = cast(ModelText, FakeModelText(TOKENIZER))
    reader = BodyReader(text, proxy_config(soonest_priority=soonest))

    def priority(kind: BodyKind, asked: int) -> int:
        prompt = {"embedding": {"input": "a"}, "completion": {"prompt": "a"}, "response": {"input": "a"}}.get(
            kind, {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
        )
        return reader.decode(json.dumps({**prompt, "priority": asked}).encode(), kind).priority

    kinds: tuple[BodyKind, ...] = ("completion", "chat", "embedding", "message", "response")
    for kind in kinds:
        assert tuple(priority(kind, asked) for asked in (-100, -3, 7)) == counts
