"""Records as text: what is written is read again exactly, and what is not a whole record is refused with a reason."""

from __future__ import annotations

import json
from array import array

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.protocol.messages.membership import WorkerInfo
from tandem.protocol.messages.packed import pack_token_ids
from tandem.protocol.messages.sampling import (
    FinishReason,
    SampledToken,
    SamplingParams,
    StopConditions,
    Thinking,
    TokenLogprobs,
)
from tandem.proxy.cluster.router import Route
from tandem.proxy.cluster.worker_record import TypicalSpeed, WorkerUse
from tandem.proxy.records import record as record_module
from tandem.proxy.records.record import (
    FORMAT,
    DamagedRecord,
    RecordedAdapter,
    RecordedWorker,
    RecordHead,
    as_float32,
    decode_record,
)
from tandem.proxy.records.recording import Recording
from tandem.proxy.text.prompt import Prompt

PREFILL = WorkerInfo("prefill-0", "p1", "prefill", "ipc://p", 1)
DECODE = WorkerInfo("decode-0", "d1", "decode", "ipc://d", 2)
SAMPLING = SamplingParams(
    temperature=0.7, top_k=5, logit_bias=((3, -1.5),), bad_words=((1, 2), (3,)), grammar='start: "ü\n"',
    thinking=Thinking(False, (1,), (2,), (2, 3), 7), seed=2**63 - 1,
)  # fmt: skip


def route(prefill: WorkerInfo = PREFILL, decode: WorkerInfo | None = DECODE) -> Route:
    use = WorkerUse(TypicalSpeed(1.0))
    return Route(prefill, decode, use, use, 0, 0, 0.0, 0.0, 0.0, 0, False)


def described(worker: WorkerInfo) -> RecordedWorker:
    return RecordedWorker(worker.worker_id, "ab12", {"dtype": "bfloat16", "num_threads": 2})


def sampled(token_id: int, logprob: float) -> SampledToken:
    return SampledToken(token_id, TokenLogprobs(logprob, 1, []))


def recording(owner: str = "alice", request_id: str = "r-1") -> Recording:
    head = RecordHead(
        request_id=request_id, api="chat", created=5, model="m", model_id="digest",
        adapter=RecordedAdapter("a", "b"), bad_words=["no", "ü"],
    )  # fmt: skip
    return Recording(owner, head, described)


def written(tokens: list[tuple[int, float]], end: FinishReason | None = "stop") -> bytes:
    made = recording()
    seeds = [msgspec.structs.replace(SAMPLING, seed=seed) for seed in (2**63 - 1, 0)]
    made.on_prompt(Prompt(pack_token_ids([1, 2, 2**31 - 1]), 3), StopConditions(10_000, frozenset({0, 9}), 2), seeds)
    made.on_tokens(0, [sampled(*each) for each in tokens], end, 1, route())
    made.on_tokens(1, [sampled(4, -0.5)], "length", 1, route(decode=None))
    return b"".join(made.lines("stop"))


FLOAT32 = st.floats(width=32)


@given(tokens=st.lists(st.tuples(st.integers(0, 2**31 - 1), FLOAT32), max_size=20))
def test_every_token_and_log_probability_is_read_as_it_was_written(tokens: list[tuple[int, float]]) -> None:
    read = decode_record(written(tokens))
    head, (first, second) = read.head, read.sequences
    assert (head.format, head.request_id, head.outcome, head.model_id) == (FORMAT, "r-1", "stop", "digest")
    assert head.adapter == RecordedAdapter("a", "b") and head.bad_words == ["no", "ü"]
    assert head.sampling == msgspec.structs.replace(SAMPLING, seed=0, logprobs=0)
    assert [prompt.token_ids for prompt in head.prompts] == [[1, 2, 2**31 - 1]]
    assert head.prompts[0].stop == StopConditions(10_000, frozenset({0, 9}), 2)
    assert [each.seed for each in read.sequences] == [2**63 - 1, 0]
    assert first.token_ids == [token_id for token_id, _ in tokens]
    for found, (_, logprob) in zip(first.logprobs, tokens, strict=True):
        expected = as_float32(logprob)
        assert (found is None) == (expected is None)
        assert found is None or array("f", [found]).tobytes() == array("f", [logprob]).tobytes()
    assert (second.token_ids, second.logprobs, second.finish_reason) == ([4], [-0.5], "length")
    by = [head.workers[number].worker_id for _, number in first.computed_by]
    assert by == ["prefill-0", "decode-0"][: len(tokens)] and second.computed_by == [(0, second.computed_by[0][1])]


def test_long_lists_are_written_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_module, "_NUMBERS_PER_PIECE", 7)
    tokens = [(number, -number / 3) for number in range(100)]
    assert decode_record(written(tokens)).sequences[0].token_ids == list(range(100))


@given(end=st.integers(0, 2000))
def test_a_record_that_ends_early_is_damaged(end: int) -> None:
    content = written([(5, -1.25), (6, -2.0)])
    if end < len(content):
        with pytest.raises(DamagedRecord):
            decode_record(content[:end])


@pytest.mark.parametrize(
    "line, field, value",
    [
        (0, "format", "tandem-record-0"), (0, "format", 5), (0, "prompts", []), (0, "workers", []),
        (0, "num_sequences", 10**9), (0, "prompts", [{"token_ids": [], "stop": {"max_tokens": 5}}]),
        (0, "prompts", [{"token_ids": [-1], "stop": {"max_tokens": 5}}]),
        (0, "prompts", [{"token_ids": [2**31], "stop": {"max_tokens": 5}}]),
        (0, "prompts", [{"token_ids": [1], "stop": {"max_tokens": 1}}]), (0, "unknown", 1), (0, "sampling", {"x": 1}),
        (1, "prompt", 7), (1, "prompt", -1), (1, "logprobs", [0.0]), (1, "token_ids", [2**40, 1]), (1, "seed", -1),
        (1, "seed", 2**64), (1, "computed_by", []), (1, "computed_by", [[1, 0]]), (1, "computed_by", [[0, 9]]),
        (1, "computed_by", [[0, 0], [0, 1]]), (1, "computed_by", [[0, 0], [5, 1]]), (1, "finish_reason", "unknown"),
    ],
)  # fmt: skip
def test_values_that_no_record_has_are_refused(line: int, field: str, value: object) -> None:
    lines = [json.loads(each) for each in written([(5, -1.25), (6, -2.0)]).splitlines()]
    lines[line][field] = value
    with pytest.raises(DamagedRecord):
        decode_record(b"".join(json.dumps(each).encode() + b"\n" for each in lines))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\n",
        b"{}\n",
        b"[" * 100_000,
        b'{"format":' + b"[" * 100_000,
        b"\xff\xfe\n",
        b"null\n",
        b'{"format":"x"}\n',
    ],
)
def test_what_is_no_record_is_refused(content: bytes) -> None:
    with pytest.raises(DamagedRecord):
        decode_record(content)


@given(content=st.binary(max_size=200))
def test_any_bytes_are_refused_with_a_reason(content: bytes) -> None:
    with pytest.raises(DamagedRecord):
        decode_record(content)


def test_a_file_larger_than_any_record_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_module, "MAX_FILE_BYTES", 10)
    with pytest.raises(DamagedRecord, match="more than any record"):
        decode_record(written([]))
