"""`tandem replay`: what it compares, what it says of a difference, and what it refuses."""

from __future__ import annotations

import json
import os
import sys
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from tandem.deploy import cli
from tandem.deploy.commands import replay_cluster
from tandem.deploy.commands.replay import (
    Computed,
    Token,
    check_computable,
    engine_settings,
    first_difference,
    lines_of,
    numerics_differences,
    replay_against,
    replay_alone,
)
from tandem.deploy.commands.replay_cluster import check_same_request, replay_on_cluster, request_body
from tandem.engine.engine_config import EngineConfig
from tandem.protocol.messages.sampling import SamplingParams, StopConditions, Thinking
from tandem.proxy.records.record import (
    NumericsFields,
    Record,
    RecordedAdapter,
    RecordedMedia,
    RecordedPrompt,
    RecordedSequence,
    RecordedWorker,
    RecordHead,
    encode_line,
)
from tandem.runtime.errors import ConfigError
from tandem.worker.lone_engine import LoneEngine
from tests.support.noise_model import ensure_noise_model

NUMERICS: NumericsFields = {
    "engine": "tandem 1",
    "dtype": "float32",
    "instruction_set": "avx512",
    "num_threads": 1,
    "problem": "",
}
WORKERS = [RecordedWorker("prefill-0", "aa", NUMERICS), RecordedWorker("decode-0", "aa", NUMERICS)]
HERE = RecordedWorker("this process", "aa", NUMERICS)
SAMPLING = SamplingParams(temperature=1.0, top_k=40, logprobs=0)


def record(tokens: Sequence[tuple[int, float | None]], **changes: Any) -> Record:
    fields = {
        "request_id": "r", "api": "completion", "created": 1, "outcome": "length", "model": "m", "model_id": "digest",
        "sampling": SAMPLING, "prompts": [RecordedPrompt([5, 6, 7], StopConditions(50, frozenset({2})))],
        "workers": WORKERS, **changes,
    }  # fmt: skip
    by = [(0, 0), (1, 1)][: len(tokens)]
    sequence = RecordedSequence(
        prompt=0, seed=11, finish_reason="length", computed_by=by,
        token_ids=[token_id for token_id, _ in tokens], logprobs=[logprob for _, logprob in tokens],
    )  # fmt: skip
    return Record(RecordHead(num_sequences=1, **fields), [sequence])


def encoded(made: Record) -> bytes:
    return encode_line(made.head) + b"".join(map(encode_line, made.sequences))


def saved(folder: Path, made: Record) -> str:
    file = folder / "record.jsonl"
    file.write_bytes(encoded(made))
    return str(file)


def run(*arguments: str, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", ["tandem", "replay", *arguments])
    with pytest.raises(SystemExit) as end:
        cli.main()
    code: int = end.value.code  # type: ignore[assignment]
    return code


def after(value: float) -> float:
    """The next float32 value."""
    return float(np.nextafter(np.float32(value), np.float32(0)))


# ---- the comparison


@pytest.mark.parametrize(
    "place, other",
    [(0, (9, -0.5)), (1, (2, after(-1.0))), (2, (3, None)), (2, (3, 0.0)), (3, None)],
)
def test_the_first_token_that_differs_is_found(place: int, other: tuple[int, float | None] | None) -> None:
    tokens: list[tuple[int, float | None]] = [(1, -0.5), (2, -1.0), (3, -0.0), (4, None)]
    made = record(tokens)
    again = list(tokens)
    assert first_difference(0, made, [Computed(Token(*each), HERE) for each in again]) is None
    again[place:] = [] if other is None else [other, *tokens[place + 1 :]]
    found = first_difference(0, made, [Computed(Token(*each), HERE) for each in again])
    assert found is not None and (found.number, found.recorded) == (place, Token(*tokens[place]))
    assert found.computed == (None if other is None else Token(*other))
    assert found.by.worker_id == ("prefill-0" if place == 0 else "decode-0")


def test_what_was_computed_beyond_the_record_is_not_compared() -> None:
    made = record([(1, -0.5)])
    assert first_difference(0, made, [Computed(Token(1, -0.5), HERE)] * 3) is None


def difference_with(by: RecordedWorker, now_by: RecordedWorker) -> str:
    made = record([(1, -0.5)], workers=[by, by])
    found = first_difference(0, made, [Computed(Token(1, -0.25), now_by)])
    assert found is not None
    return "\n".join(lines_of(found))


def test_a_difference_is_told_with_both_values_and_the_numerics_that_differ() -> None:
    other = RecordedWorker("this process", "bb", {**NUMERICS, "instruction_set": "avx2", "new": 3})
    text = difference_with(WORKERS[0], other)
    assert "differs at token 0" in text and "1 with log-probability -0.5 (prefill-0)" in text and "-0.25" in text
    assert "instruction_set was 'avx512' and is 'avx2'" in text and "new was '' and is 3" in text
    assert "dtype" not in text
    assert "equal (aa), so the difference is a defect" in difference_with(WORKERS[0], HERE)
    inexact = RecordedWorker("w", "cc", {**NUMERICS, "problem": "sums depend on the batch"})
    assert "not exact: sums depend on the batch" in difference_with(inexact, inexact)
    assert "prefill-9 has not said" in difference_with(RecordedWorker("prefill-9"), HERE)
    assert numerics_differences(NUMERICS, NUMERICS) == []


# ---- what cannot be replayed


def damaged_files(folder: Path) -> Iterator[tuple[str, str]]:
    good = Path(saved(folder, record([(1, -0.5), (2, -1.0)]))).read_bytes()
    contents = {
        "cut": good[:-20], "one line": good.splitlines(keepends=True)[0], "empty": b"", "not JSON": b"\x00\xff" * 100,
        "deep": b"[" * 1_000_000, "other format": good.replace(b"tandem-record-1", b"tandem-record-9"),
        "twice": good + good,
        "media": good.replace(b'"media":[]', b'"media":[{"kind":"image","digest":"","spans":[]}]'),
        "no digest": good.replace(b'"media":[]', b'"media":[{"kind":"image","digest":"ab\\u001b","spans":[]}]'),
        "no tokens": encoded(record([])),
    }  # fmt: skip
    for name, content in contents.items():
        file = folder / name
        file.write_bytes(content)
        yield name, str(file)
    os.mkfifo(folder / "fifo")
    yield "fifo", str(folder / "fifo")
    yield "folder", str(folder)
    yield "missing", str(folder / "missing")
    yield "device", "/dev/zero"


def test_damaged_and_hostile_files_are_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, file in damaged_files(tmp_path):
        for more in ((), ("--url", "http://127.0.0.1:9")):
            assert run(file, *more, monkeypatch=monkeypatch) == 2, name
            output = capsys.readouterr()
            assert output.out == "" and output.err.startswith("tandem: ") and output.err.count("\n") == 1, name


def about_picture(digest: str, tokens: Sequence[tuple[int, float | None]] = ((1, -0.5),), **changes: Any) -> Record:
    media = [RecordedMedia("image", digest, ((0, 1),)), RecordedMedia("video", "f0" * 32, ((1, 1),))]
    return record(tokens, prompts=[RecordedPrompt([5, 6, 7], StopConditions(50), media)], **changes)


@pytest.mark.parametrize("more", [(), ("--url", "http://127.0.0.1:9")])
def test_media_that_a_record_lacks_are_named_with_what_to_do(
    more: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(saved(tmp_path, about_picture("ab" * 32)), *more, monkeypatch=monkeypatch) == 2
    error = capsys.readouterr().err
    assert "the image abababababababab, the video f0f0f0f0f0f0f0f0, and" in error and error.count("\n") == 1
    assert "X-Tandem-Record: 1 and the seed 11" in error and "--against FILE" in error


def test_an_error_names_few_of_many_media(tmp_path: Path) -> None:
    prompts = [
        RecordedPrompt([5], StopConditions(5), [RecordedMedia("image", f"{i:064}", ((0, 1),))]) for i in range(99)
    ]
    with pytest.raises(ConfigError, match="and 95 more") as error:
        check_computable(record([(1, -0.5)], prompts=prompts))
    assert len(error.value.message) < 500


def test_two_records_of_one_request_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first = saved(tmp_path, about_picture("ab" * 32, [(1, -0.5), (2, -1.0)]))
    (tmp_path / "again").mkdir()

    def against(other: Record) -> int:
        return run(first, "--against", saved(tmp_path / "again", other), monkeypatch=monkeypatch)

    other_worker = RecordedWorker("decode-7", "bb", {**NUMERICS, "instruction_set": "avx2"})
    assert against(about_picture("ab" * 32, [(1, -0.5), (2, -1.0)], workers=[other_worker] * 2, request_id="r2")) == 0
    assert capsys.readouterr().out.startswith("equal: 1 sequence, 2 tokens")
    assert against(about_picture("ab" * 32, [(1, -0.5), (2, after(-1.0))], workers=[other_worker] * 2)) == 1
    output = capsys.readouterr().out
    assert "differs at token 1" in output and "instruction_set was 'avx512' and is 'avx2'" in output
    assert against(about_picture("ab" * 32, [(1, -0.5)])) == 1
    assert "no token" in capsys.readouterr().out


@pytest.mark.parametrize(
    "other, reason",
    [
        (about_picture("cd" * 32), f"an image or video was 'image {'ab' * 32}', and is 'image {'cd' * 32}'"),
        (record([(1, -0.5)]), "and is 'none'"),
        (about_picture("ab" * 32, model_id="x"), "the model was 'digest', and is 'x'"),
        (about_picture("ab" * 32, sampling=msgspec.structs.replace(SAMPLING, top_k=1)), "the sampling was"),
        (
            Record(about_picture("ab" * 32).head, [msgspec.structs.replace(record([]).sequences[0], seed=12)]),
            "a seed was 11, and is 12",
        ),
    ],
)
def test_records_of_other_requests_are_not_compared(other: Record, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"of different requests: .*{reason}"):
        replay_against(about_picture("ab" * 32), other)


def test_a_sequence_that_ended_before_its_first_token_is_equal(capsys: pytest.CaptureFixture[str]) -> None:
    one = record([(1, -0.5)])
    both = Record(msgspec.structs.replace(one.head, num_sequences=2), [one.sequences[0], record([]).sequences[0]])
    assert replay_against(both, both) == 0
    assert capsys.readouterr().out.startswith("equal: 2 sequences, 1 tokens")


# ---- alone


@pytest.fixture(scope="module")
def computed() -> Record:
    """A record of what the noise model computes."""
    model = str(ensure_noise_model())
    engine = LoneEngine(EngineConfig(model, dtype="float32", num_threads=1, exact=True))
    sampling = msgspec.structs.replace(SAMPLING, seed=11)
    found = list(engine.tokens([5, 6, 7], sampling, StopConditions(50, frozenset({2})), 8))
    tokens = [(each.token_id, each.logprobs.logprob) for each in found if each.logprobs is not None]
    model_id = engine.loaded.layout.model_id
    engine.close()
    return record(tokens, model_id=model_id)


def test_a_recorded_answer_is_computed_again(
    computed: Record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(ensure_noise_model())
    assert run(saved(tmp_path, computed), "--model", model, monkeypatch=monkeypatch) == 0
    assert capsys.readouterr().out.startswith("equal: 1 sequence, 8 tokens")
    [sequence] = computed.sequences
    changed = [*sequence.logprobs]
    changed[5] = after(changed[5] or -1.0)
    other = Record(computed.head, [msgspec.structs.replace(sequence, logprobs=changed)])
    assert run(saved(tmp_path, other), "--model", model, monkeypatch=monkeypatch) == 1
    output = capsys.readouterr().out
    assert "sequence 0 differs at token 5" in output and output.endswith("differs: 1 of 1 sequence\n")
    other = Record(computed.head, [msgspec.structs.replace(sequence, seed=12)])
    assert run(saved(tmp_path, other), "--model", model, monkeypatch=monkeypatch) == 1


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"model_id": "other"}, "another one"),
        ({"sampling": msgspec.structs.replace(SAMPLING, temperature=-1.0)}, "temperature"),
        ({"sampling": msgspec.structs.replace(SAMPLING, grammar="start: (")}, "grammar"),
        ({"prompts": [RecordedPrompt([2**31 - 1], StopConditions(50))]}, "vocabulary"),
        ({"prompts": [RecordedPrompt([5] * 100_000, StopConditions(50))]}, "tokens"),
        ({"adapter": RecordedAdapter("sql", "ab")}, "--lora sql=FOLDER"),
    ],
)
def test_what_the_model_cannot_compute_has_status_2(
    computed: Record,
    changes: dict[str, Any],
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    other = Record(msgspec.structs.replace(computed.head, **changes), computed.sequences)
    status = run(saved(tmp_path, other), "--model", str(ensure_noise_model()), monkeypatch=monkeypatch)
    error = capsys.readouterr().err
    assert status == 2 and reason in error and "Traceback" not in error


@pytest.mark.parametrize(
    "numerics, settings",
    [
        ({}, {}),
        ({"dtype": "bfloat16", "problem": ""}, {"dtype": "bfloat16", "exact": True}),
        ({"problem": "sums depend on the batch", "num_threads": 3}, {"exact": False, "num_threads": 3}),
        ({"kv_dtype": "float8_e4m3fn", "max_model_len": 99}, {"kv_cache_dtype": "fp8", "max_model_len": 99}),
        ({"quantization": "int8 W8A8, quantised when loaded"}, {"quantization": "int8"}),
        ({"quantization": "gptq", "kernels": "cpu-1, blocks of 32"}, {"block_size": 32}),
        ({"dtype": 5, "num_threads": "x", "max_model_len": -1, "kernels": "blocks of 99999", "kv_dtype": 1}, {}),
    ],
)
def test_the_engine_computes_as_the_workers_did(numerics: Any, settings: dict[str, Any]) -> None:
    found = engine_settings(numerics)
    expected = {"exact": True} if numerics else {}
    assert {"num_threads": found["num_threads"], **expected, **settings} == found
    msgspec.convert({"model": "m", **found}, EngineConfig)


def test_a_folder_without_a_model_has_status_2(computed: Record, tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        replay_alone(computed, str(tmp_path), "cpu", [])


# ---- on a cluster


@contextmanager
def cluster(answers: Callable[[str, Any], tuple[int, bytes]]) -> Iterator[tuple[str, list[Any]]]:
    """Yields a URL, and (path, headers, body) of each request. answers: returns status and body for path and body."""
    received: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def do_GET(self) -> None:
            self._answer(None)

        def _answer(self, body: Any) -> None:
            received.append((self.path, dict(self.headers), body))
            status, content = answers(self.path, body)
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None: ...

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{http.server_port}", received
    finally:
        http.shutdown()
        http.server_close()
        thread.join()


def test_a_cluster_computes_each_sequence_and_both_records_are_compared(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay_cluster, "RECORD_INTERVAL_S", 0.0)
    one = record([(1, -0.5), (2, -1.0)])
    both = Record(msgspec.structs.replace(one.head, num_sequences=2), [one.sequences[0]] * 2)
    num_lookups = 0
    logprob = -1.0

    def answers(path: str, body: Any) -> tuple[int, bytes]:
        nonlocal num_lookups
        if body is not None:
            return 200, b"{}"
        num_lookups += 1
        if num_lookups % 3:
            return 404, b'{"error":{"message":"not yet"}}'
        return 200, encoded(record([(1, -0.5), (2, logprob)]))

    with cluster(answers) as (url, received):
        assert replay_on_cluster(both, "", f"{url}/", "k", 30.0) == 0
        assert "equal: 2 sequences, 4 tokens" in capsys.readouterr().out
        logprob = after(-1.0)
        assert replay_on_cluster(both, "", url, "", 30.0) == 1
        assert "sequence 1 differs at token 1" in capsys.readouterr().out
    path, headers, body = received[0]
    assert path == "/v1/completions" and headers["X-Tandem-Record"] == "1" and headers["Authorization"] == "Bearer k"
    assert body["prompt"] == [5, 6, 7] and body["seed"] == 11 and body["max_tokens"] == 2 and body["ignore_eos"]
    assert received[1][0] == f"/v1/tandem/records/{headers['X-Request-Id']}"


@pytest.mark.parametrize(
    "status, content, reason",
    [
        (401, b"{}", "--api-key"),
        (400, b'{"error":{"message":"too\\nlong"}}', "HTTP 400: too long"),
        (500, b"\xff", "is the address that of a Tandem cluster"),
        (200, b"[1]", "is not whole"),
        (200, encoded(record([(1, -0.5)], model_id="x")), "the cluster serves m"),
    ],
)
def test_what_a_cluster_cannot_compute_has_status_2(
    status: int, content: bytes, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    with cluster(lambda path, body: (status, content)) as (url, _):
        code = run(saved(tmp_path, record([(1, -0.5)])), "--url", url, monkeypatch=monkeypatch)
    assert code == 2 and reason in capsys.readouterr().err


def test_a_cluster_that_sends_without_end_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay_cluster, "MAX_FILE_BYTES", 1000)
    with (
        cluster(lambda path, body: (200, b"x" * 100_000)) as (url, _),
        pytest.raises(ConfigError, match="more than 1000 bytes"),
    ):
        replay_on_cluster(record([(1, -0.5)]), "", url, "", 30.0)


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "ftp://x", "nonsense", "http://[::1"])
def test_no_cluster_has_status_2(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(saved(tmp_path, record([(1, -0.5)])), "--url", url, monkeypatch=monkeypatch) == 2
    assert "--url" in capsys.readouterr().err or "is not a URL"


def test_the_body_asks_for_every_setting() -> None:
    sampling = SamplingParams(
        temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, repetition_penalty=1.1, presence_penalty=0.2,
        frequency_penalty=0.3, logit_bias=((3, 1.5),), allowed_token_ids=(3, 4), bad_words=((9,),),
        grammar="start: /a/", thinking=Thinking(True, (1,), (2,), (2,), 5), logprobs=0,
    )  # fmt: skip
    made = record(
        [(1, -0.5), (2, -1.0)], sampling=sampling, bad_words=["no"],
        prompts=[RecordedPrompt([5], StopConditions(50, frozenset({2, 8}), 40))], adapter=RecordedAdapter("sql", "d"),
    )  # fmt: skip
    body = request_body(made.head, made.sequences[0], "")
    assert body == {
        "prompt": [5], "max_tokens": 2, "min_tokens": 2, "ignore_eos": True, "stop_token_ids": [2, 8], "seed": 11,
        "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "repetition_penalty": 1.1, "presence_penalty": 0.2,
        "frequency_penalty": 0.3, "model": "sql", "logit_bias": {"3": 1.5}, "allowed_token_ids": (3, 4),
        "bad_words": ["no"], "structured_outputs": {"grammar": "start: /a/"}, "thinking_token_budget": 5,
    }  # fmt: skip
    assert request_body(made.head, made.sequences[0], "other")["model"] == "other"


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"sampling": msgspec.structs.replace(SAMPLING, bad_words=((1,),))}, "bad_words"),
        ({"sampling": msgspec.structs.replace(SAMPLING, grammar="start: /a/")}, "grammar"),
        ({"adapter": RecordedAdapter("a", "digest")}, "LoRA adapter"),
        ({"prompts": [RecordedPrompt([5, 6], StopConditions(50))]}, "prompt"),
        ({"prompts": [RecordedPrompt([5, 6, 7], StopConditions(50, frozenset({3}), 4))]}, "stop_token_ids"),
    ],
)
def test_a_request_that_the_api_cannot_express_is_refused(changes: dict[str, Any], reason: str) -> None:
    made = record([(1, -0.5)])
    check_same_request(made.head, made.sequences[0], record([(1, -0.5)], workers=[]))
    unlike = record([(1, -0.5)], **changes)
    with pytest.raises(ConfigError, match=reason):
        check_same_request(unlike.head, unlike.sequences[0], made)


def test_float32_values_are_compared_by_their_bits() -> None:
    made = record([(1, float(array("f", [-0.1])[0]))])
    same = [Computed(Token(1, float(np.float32(-0.1))), HERE)]
    assert first_difference(0, made, same) is None
