"""No error tells clients of files and folders of the server.

Errors of the server (5xx) lose what looks like a path when they become an answer. Those that blame the request may
quote it, and its text may look like a path; so a rule keeps other text out of them.
"""

from __future__ import annotations

import ast
import errno
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from starlette.requests import Request

from tandem.proxy.answers.errors import error_body, messages_error, status_of, tandem_error_response
from tandem.runtime.errors import (
    _BY_CODE,
    ErrorInfo,
    InternalError,
    InvalidRequest,
    TandemError,
    client_reason,
    without_paths,
)
from tests.support.product import name_of, python_files

ROOT = Path(__file__).parents[3]
PACKAGES = (
    "proxy",
    "prefill_worker",
    "decode_worker",
    "worker",
    "vllm_worker",
    "engine",
    "media_cache",
    "protocol",
    "runtime",
)
PATHS = [
    "/srv/models/llama/tokenizer.json", "/data", "~/.cache/huggingface/hub", "./adapters/a", "../x/y.bin",
    "/proc/self/fd/17", "file:///srv/adapters/a b", "ipc:///run/user/0/prefill-0", "unix:/run/x.sock",
    "/srv/My Models/x.safetensors", "/data/été/模型/a.bin",
]  # fmt: skip
TEXTS = [
    "cannot open {}: No such file", "[Errno 2] No such file or directory: '{}'", 'in "{}", line 3', "{} is broken",
    "at ({})", "see `{}`", "path={}", "it is in:{}", "{}:12: it is broken",
]  # fmt: skip


# ---- what looks like a path


def is_quoted(text: str) -> bool:
    return any(f"{quote}{{}}" in text for quote in "'\"`")


@pytest.mark.parametrize(
    ("path", "text"), [(path, text) for path in PATHS for text in TEXTS if " " not in path or is_quoted(text)]
)
def test_paths_are_left_out(path: str, text: str) -> None:
    """Where an unquoted path with spaces ends cannot be told."""
    cleaned = without_paths(text.format(path))
    assert "/" not in cleaned and "(a file of the server)" in cleaned
    assert cleaned.replace("(a file of the server)", "") in (
        text.format(""),
        text.replace("'{}'", "").replace('"{}"', "").replace("`{}`", ""),
    )


@pytest.mark.parametrize(
    "text",
    [
        "140 tokens/s", "conversations alternate user/assistant/user", "try again and/or wait", "see https://example.com/a/b",
        "a prompt of 3 / 4 tokens", "</think> is missing", "1/2", "tcp://127.0.0.1:9", "",
    ],
)  # fmt: skip
def test_other_slashes_stay(text: str) -> None:
    assert without_paths(text) == text


@example(""" `/:"/"`""")
@example("""/`/'//:'`""")
@example("""an"/:'/'"/""")
@given(st.text(st.sampled_from("ab/ .'~:`\"\\n"), max_size=60))
def test_nothing_that_is_left_looks_like_a_path(text: str) -> None:
    cleaned = without_paths(text)
    assert without_paths(cleaned) == cleaned


def test_an_error_of_the_operating_system_is_told_by_its_kind() -> None:
    error = FileNotFoundError(errno.ENOENT, "No such file or directory", "models/secret/config.json")
    assert client_reason(error) == "No such file or directory"
    assert client_reason(ValueError("in /srv/x: bad\nsecond line")) == "in (a file of the server): bad"


# ---- answers


def kinds(kind: type[TandemError] = TandemError) -> Iterator[type[TandemError]]:
    yield kind
    for each in kind.__subclasses__():
        yield from kinds(each)


SERVER_KINDS = sorted(
    {each for each in kinds() if not issubclass(each, InvalidRequest)}, key=lambda each: each.__name__
)


@pytest.mark.parametrize("kind", SERVER_KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("path", ["/srv/models/llama/x.json", "'/srv/My Models/x.json'"])
def test_errors_of_the_server_have_no_paths_in_any_answer(kind: type[TandemError], path: str) -> None:
    error = kind.__new__(kind)
    TandemError.__init__(error, f"a worker failed: cannot read {path}")
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "headers": [],
        "query_string": b"",
        "state": {},
    }
    messages = {**scope, "path": "/v1/messages"}
    bodies = [
        error_body(error),
        msgspec.json.encode(messages_error(error)),
        tandem_error_response(Request(scope), error).body,
        tandem_error_response(Request(messages), error).body,
        ErrorInfo.of(error).to_error().for_client.encode(),
    ]
    for body in bodies:
        assert b"srv" not in bytes(body) and b"Models" not in bytes(body) and b"a worker failed" in bytes(body)
    assert path in error.message and path in str(error), "logs have it"


def test_what_blames_the_request_may_quote_it() -> None:
    error = InvalidRequest("pattern '/api/v1/.*' is not supported")
    assert "/api/v1/" in error_body(error).decode() and status_of(error) == 400


def test_an_error_of_another_process_is_one_of_the_server_unless_it_blames_the_request() -> None:
    for code in [*_BY_CODE, "unknown"]:
        error = ErrorInfo(code, "see /srv/x").to_error()
        assert isinstance(error, InvalidRequest) or "srv" not in error.for_client
    assert type(ErrorInfo("unknown", "x").to_error()) is InternalError


# ---- code rules

QUOTES_THE_REQUEST = {
    "proxy/api/field_checks.py": "msgspec, about the body",
    "proxy/api/grammar_checks.py": "the converter, about the grammar",
    "proxy/api/structured_output.py": "msgspec, about the schema",
    "proxy/api/responses_api/responses_chat.py": "msgspec, about a tool",
    "proxy/text/rendering.py": "msgspec, about the prompt",
    "proxy/text/model_text.py": "the chat template's own words",
    "proxy/batches/batch_lines.py": "msgspec, about a line",
    "proxy/http/routes/admin.py": "msgspec, about the body",
    "proxy/http/routes/batches.py": "the parser of forms, about the form",
    "proxy/cluster/adapter_table.py": "answers to operators",
    "runtime/files/lora_files.py": "answers to operators, with the folder that they gave; workers do not pass it on",
    "engine/lora/adapters.py": "workers do not pass it on",
}
"""Modules whose errors may have the text of an exception, or a path, and why."""
OWN_WORDS = {"RefusedURL"}
"""Exceptions of ours, about what the client has sent."""
NAMES_FILES = ("path", "folder", "file", "directory", "segment")
"""Last words of names."""


def client_error_names() -> set[str]:
    """Names of the classes whose messages reach clients as they are."""
    return {each.__name__ for each in kinds(InvalidRequest)} | {"refused", "numbered"}


def blamed(tree: ast.Module, names: set[str]) -> Iterator[tuple[int, str]]:
    """Yields (line, expression) of what messages have of exceptions and paths."""
    for handler in ast.walk(tree):
        if isinstance(handler, ast.ExceptHandler) and handler.name and handler.type is not None:
            if ast.unparse(handler.type) in OWN_WORDS:
                continue
            told = {handler.name}
            for node in ast.walk(handler):
                if isinstance(node, ast.Assign) and any(True for _ in _telling(node.value, told)):
                    told |= {each.id for each in node.targets if isinstance(each, ast.Name)}
            yield from _parts(handler, names, told)
    yield from _parts(tree, names, set())


def _parts(tree: ast.AST, names: set[str], told: set[str]) -> Iterator[tuple[int, str]]:
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and call.args:
            name = call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")
            if name in names:
                yield from ((call.lineno, ast.unparse(part)) for part in _telling(call.args[0], told))


def _telling(node: ast.AST, told: set[str]) -> Iterator[ast.AST]:
    """Yields the parts of an expression that tell what an exception says, or where a file is. told: exceptions."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("client_reason", "type"):
        return
    if isinstance(node, ast.Attribute) and node.attr in ("reason", "message", "strerror", "errno"):
        return
    name = node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")
    is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "first_line"
    if name in told or is_call or name.lower().split("_")[-1] in NAMES_FILES:
        yield node
        return
    for child in ast.iter_child_nodes(node):
        yield from _telling(child, told)


def test_errors_that_blame_the_request_have_no_text_of_exceptions_and_no_paths() -> None:
    names, found = client_error_names(), []
    for file in python_files():
        if (name := name_of(file)) not in QUOTES_THE_REQUEST:
            found += [f"{name}:{line}: {text}" for line, text in blamed(ast.parse(file.read_text()), names)]
    assert not found, "\n".join(["use client_reason:", *sorted(set(found))])


def test_the_rule_finds_what_it_forbids() -> None:
    text = """
try:
    load()
except OSError as error:
    raise InvalidRequest(f"cannot load {folder}: {error}")
    raise InvalidRequest(f"cannot load: {first_line(error)}")
    raise InvalidRequest(f"cannot load: {client_reason(error)} {self._path} {error.strerror}")
    raise InvalidRequest(why(first_line(error)[:10]))
    reason = f"{type(error).__name__}: {error.args}"
    raise InvalidRequest("cannot load: " + reason)
    raise ConfigError(f"{error}")
"""
    found = {part for _, part in blamed(ast.parse(text), {"InvalidRequest"})}
    assert found == {"folder", "error", "first_line(error)", "self._path", "reason"}


def test_answers_are_made_of_what_clients_may_read() -> None:
    """`error.message` is for logs."""
    files = [*(ROOT / "proxy" / "answers").glob("*.py"), *(ROOT / "proxy" / "batches").glob("*.py")]
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute) and node.attr == "message" and isinstance(node.value, ast.Name):
                assert node.value.id not in ("error", "failure"), f"{file}:{node.lineno}"
