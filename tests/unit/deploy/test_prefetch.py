"""`tandem cache prefetch`: the request that it sends, and what it says about answers and mistakes."""

from __future__ import annotations

import asyncio
import io
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tandem.deploy import cli
from tandem.deploy.commands.prefetch import cached_line, prefetch, read_request
from tandem.runtime.errors import ConfigError, InternalError, Overloaded, TandemError

USAGE = {"prompt_tokens": 1200, "prompt_tokens_details": {"cached_tokens": 1024}}


@contextmanager
def server(status: int, answer: object, before: Callable[[], object] = lambda: None) -> Iterator[tuple[str, list[Any]]]:
    """Yields a URL, and (path, Authorization, body) of each request that was sent to it."""
    received: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            received.append((self.path, self.headers.get("Authorization"), body))
            before()
            content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
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


def run(url: str, body: dict[str, Any], api_key: str = "", timeout_s: float = 30.0) -> None:
    asyncio.run(prefetch(url, body, api_key, timeout_s))


def test_the_request_asks_for_one_token(capsys: pytest.CaptureFixture[str]) -> None:
    with server(200, {"usage": USAGE}) as (url, received):
        run(url, {"model": "m", "messages": [], "max_completion_tokens": 9, "stream": True, "stream_options": {}}, "k")
        run(f"{url}/", {"model": "m", "prompt": "p", "max_tokens": 7, "n": 3, "min_tokens": 2, "cache_salt": "s"})
    fields = {"model": "m", "max_tokens": 1, "stream": False}
    assert received == [
        ("/v1/chat/completions", "Bearer k", {**fields, "messages": []}),
        ("/v1/completions", None, {**fields, "prompt": "p", "cache_salt": "s"}),
    ]
    assert capsys.readouterr().out == "1200 prompt tokens, 1024 of them were cached\n" * 2


def test_the_command_takes_address_and_key(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TANDEM_API_KEY", "from-environment")
    with server(200, {"usage": USAGE}) as (url, received):
        for options in (["--url", url], ["--port", url.rpartition(":")[2], "--api-key", "given"]):
            monkeypatch.setattr("sys.stdin", io.StringIO('{"prompt": [1, 2]}'))
            arguments = cli._parser().parse_args(["cache", "prefetch", "-", *options])
            arguments.run(arguments)
    assert [key for _, key, _ in received] == ["Bearer from-environment", "Bearer given"]
    assert capsys.readouterr().out.count("1024 of them were cached") == 2


@pytest.mark.parametrize(
    ("status", "answer", "kind", "words"),
    [
        (401, {"error": {"message": "?"}}, ConfigError, "set TANDEM_API_KEY, or give --api-key"),
        (400, {"error": {"message": "prompt is\ntoo long"}}, ConfigError, "HTTP 400: prompt is too long"),
        (503, {"error": {"message": "queue is full"}}, Overloaded, "HTTP 503: queue is full"),
        (429, {"error": {"message": "slower"}}, Overloaded, "HTTP 429: slower"),
        (500, b"<html>", InternalError, "HTTP 500: .* is the address that of a Tandem cluster"),
        (302, {"detail": "elsewhere"}, InternalError, "HTTP 302"),
        (200, b"<html>", InternalError, "no usage; is the address"),
        (200, ["usage"], InternalError, "no usage; is the address"),
    ],
)
def test_refusals_are_errors(status: int, answer: object, kind: type[TandemError], words: str) -> None:
    with server(status, answer) as (url, _), pytest.raises(kind, match=words) as raised:
        run(url, {"prompt": "p"})
    assert "\n" not in raised.value.message


def test_an_answer_without_details_counts_no_cached_tokens() -> None:
    assert cached_line(b'{"usage": {"prompt_tokens": 5}}') == "5 prompt tokens, 0 of them were cached"


def test_an_answer_that_does_not_come_is_an_error() -> None:
    released = threading.Event()
    with server(200, {"usage": USAGE}, lambda: released.wait(60)) as (url, _):
        try:
            with pytest.raises(Overloaded, match=r"has not answered within 0\.2 s"):
                run(url, {"prompt": "p"}, timeout_s=0.2)
        finally:
            released.set()


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://127.0.0.1:9", "no cluster answers at .* give its --port or --url"),  # nothing listens there
        ("127.0.0.1:8000", "is not a URL; write it as http://HOST:PORT"),
        ("http://a:b", "is not a URL; write it as http://HOST:PORT"),
    ],
)
def test_wrong_addresses_are_refused(url: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        run(url, {"prompt": "p"})


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "is not JSON"),
        ("[]", 'must be the body of a chat, with "messages"'),
        ('{"model": "m"}', 'or of a completion, with "prompt"'),
        ('{"messages": [], "prompt": ""}', "must be the body"),
    ],
)
def test_wrong_files_are_refused(tmp_path: Path, content: str, words: str) -> None:
    file = tmp_path / "request.json"
    file.write_text(content)
    with pytest.raises(ConfigError, match=words) as refused:
        read_request(str(file))
    assert refused.value.message.startswith(str(file))


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*/none: No such file"):
        read_request(str(tmp_path / "none"))
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is not JSON"):
        read_request(str(tmp_path / "binary"))
