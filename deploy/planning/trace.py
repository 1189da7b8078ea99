"""Recorded traces: when requests came, how long prompts and answers were, and which prefixes prompts share.

A trace is one of three files:
- what proxies write with `--log-format json`: the lines of the logger `request`. They do not tell which prefixes
  prompts share, so tokens that were found in a cache then are left out of the prompts;
- JSON lines with `timestamp` (ms), `input_length` and `output_length`, as Mooncake's traces. `hash_ids` name the blocks
  of 512 tokens that a prompt begins with. `chat_id` and `parent_chat_id`, as in Alibaba's traces, name the turns of a
  chat, whose prompts begin with the prompt and the answer of the turn before;
- CSV with the columns TIMESTAMP, ContextTokens and GeneratedTokens, as Azure's traces.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from tandem.deploy.planning.player import TraceRequest
from tandem.runtime.errors import ConfigError

MAX_REQUESTS = 100_000
MAX_LINE_BYTES = 1 << 20
MAX_SPAN_S = 86_400.0
"""Workers and proxies also exchange reports while no request runs, so an idle day is a long simulation, too."""
_CSV_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


class _Line(msgspec.Struct, frozen=True):
    """A line as of Mooncake and Alibaba. Other fields are ignored."""

    timestamp: float
    input_length: Annotated[int, Meta(ge=1)]
    output_length: Annotated[int, Meta(ge=1)]
    hash_ids: tuple[Annotated[int, Meta(ge=0)], ...] = ()
    chat_id: int = -1
    parent_chat_id: int = -1


class _LogLine(msgspec.Struct, frozen=True):
    """A line of a proxy's log. unix_s: when the request ended."""

    logger: str
    unix_s: float
    e2e_ms: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


def read_trace(file: Path, max_model_len: int) -> list[TraceRequest]:
    """Returns the requests in the order of their times. Raises ConfigError, which names the line and what to do."""
    found: list[TraceRequest] = []
    parse: Callable[[bytes], TraceRequest | None] | None = None
    for number, line in enumerate(_lines(file), 1):
        try:
            parse = parse or _parser(line)
            request = parse(line) if line.strip() else None
        except (ValueError, msgspec.MsgspecError) as error:
            raise ConfigError(f"{file}, line {number}: {error}; correct or remove the line") from error
        if request is None:
            continue
        if (num_tokens := request.num_prompt_tokens + request.num_output_tokens) > max_model_len:
            raise ConfigError(
                f"{file}, line {number}: prompt and answer have {num_tokens:,} tokens, but the model takes "
                f"{max_model_len:,}; remove the line, or raise max_model_len in the file of --step-times"
            )
        if len(found) == MAX_REQUESTS:
            raise ConfigError(f"{file}: more than {MAX_REQUESTS:,} requests; cut the file, for example with `head`")
        found.append(request)
    if not found:
        raise ConfigError(f"{file} has no requests; `tandem simulate --help` names the formats of traces")
    order = sorted(range(len(found)), key=lambda number: found[number].at)
    places = {number: place for place, number in enumerate(order)}
    first, last = found[order[0]].at, found[order[-1]].at
    if not last - first <= MAX_SPAN_S:
        raise ConfigError(
            f"{file}: its requests came within {(last - first) / 3600:,.0f} h, and a trace may take "
            f"{MAX_SPAN_S / 3600:.0f} h; cut the file, or correct its times (`timestamp` is in ms)"
        )
    return [
        replace(each, at=each.at - first, follows=None if each.follows is None else places[each.follows])
        for each in (found[number] for number in order)
    ]


def _lines(file: Path) -> Iterator[bytes]:
    try:
        with file.open("rb") as opened:
            while line := opened.readline(MAX_LINE_BYTES):
                yield line
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from error


def _parser(first: bytes) -> Callable[[bytes], TraceRequest | None]:
    """Returns what reads a line of the file that begins with this one."""
    if b'"logger"' in first:
        return _of_log
    if first.lstrip().startswith(b"{"):
        return _Turns().of_line
    columns = [column.strip() for column in first.decode("utf-8-sig").split(",")]
    if missing := [column for column in _CSV_COLUMNS if column not in columns]:
        raise ValueError(f"neither JSON nor a header of CSV: {', '.join(missing)} is missing")
    return lambda line: None if line is first else _of_csv(columns, line)


def _of_log(line: bytes) -> TraceRequest | None:
    """Skips lines of other loggers, and requests without an answer."""
    read = msgspec.json.decode(line, type=_LogLine)
    if read.logger != "request" or read.completion_tokens < 1:
        return None
    num_prompt_tokens = max(1, read.prompt_tokens - max(0, read.cached_tokens))
    return TraceRequest(read.unix_s - read.e2e_ms / 1000, num_prompt_tokens, read.completion_tokens)


def _of_csv(columns: list[str], line: bytes) -> TraceRequest:
    [cells] = csv.reader([line.decode()])
    row = dict(zip(columns, cells, strict=True))
    at = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()
    num_prompt_tokens, num_output_tokens = int(row["ContextTokens"]), int(row["GeneratedTokens"])
    return TraceRequest(at, max(1, num_prompt_tokens), max(1, num_output_tokens))


@dataclass
class _Turns:
    """Reads JSON lines. numbers: of requests, by chat_id."""

    numbers: dict[int, int] = field(default_factory=dict)
    num_lines: int = 0

    def of_line(self, line: bytes) -> TraceRequest:
        read = msgspec.json.decode(line, type=_Line)
        follows = None
        if read.parent_chat_id >= 0 and (follows := self.numbers.get(read.parent_chat_id)) is None:
            raise ValueError(f"no line before has the chat_id {read.parent_chat_id}, its parent_chat_id")
        if read.chat_id >= 0:
            self.numbers[read.chat_id] = self.num_lines
        self.num_lines += 1
        return TraceRequest(read.timestamp / 1000, read.input_length, read.output_length, read.hash_ids, follows)
