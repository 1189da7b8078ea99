"""The record of one request: what its answer follows from, and the answer. Pure.

A record is JSON lines. The first one has everything that the sequences share; each further line is one sequence. It
contains the prompts and the answer as token ids. `tandem replay` computes it again (docs/replay.md).
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Any

import msgspec

from tandem.protocol.messages.media import MediaKind
from tandem.protocol.messages.packed import token_array
from tandem.protocol.messages.sampling import FinishReason, SamplingParams, StopConditions
from tandem.runtime.errors import ConfigError

FORMAT = "tandem-record-1"
"""Another number for every change that older releases would misread."""
MAX_RECORD_BYTES = 16 << 20
"""Limit on one record: 2 million tokens of prompts, or half a million tokens of answers."""
MAX_FILE_BYTES = MAX_RECORD_BYTES * 3 // 2
"""Limit on the file, whose size is estimated before it is written."""
PROMPT_TOKEN_BYTES, ANSWER_TOKEN_BYTES, SEQUENCE_BYTES = 8, 32, 256
"""Largest usual size in JSON of a prompt's token, of an answer's with its log-probability, and of the rest of a
sequence's line."""
_NUMBERS_PER_PIECE = 4096
"""Numbers that are encoded at once: other threads run after 0.2 ms at most."""

NumericsFields = dict[str, str | int]
"""The fields of `protocol.messages.numerics.Numerics`. Another release may have more of them, or fewer."""


class DamagedRecord(ConfigError):
    """The file is no record, or not a whole one."""


class RecordedMedia(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An image or a video of a prompt, without its bytes."""

    kind: MediaKind
    digest: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{0,64}\Z")]
    """See `MediaItem.digest`."""
    spans: tuple[tuple[int, int], ...]
    """See `MediaItem.spans`."""


class RecordedPrompt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    token_ids: list[int]
    stop: StopConditions
    media: list[RecordedMedia] = []


class RecordedAdapter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The LoRA adapter that the request named as its model."""

    name: str
    digest: str
    """See `AdapterRef.digest`."""


class RecordedWorker(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A worker that computed tokens of the answer. One that was restarted meanwhile is another one."""

    worker_id: str
    numerics_digest: str = ""
    """Empty if the worker has not said what its arithmetic depends on."""
    numerics: NumericsFields = {}


class RecordHead(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The first line of a record."""

    format: str = FORMAT
    request_id: str
    api: str
    """completion, chat, response or message."""
    created: int
    """Seconds since 1970, when the request arrived."""
    outcome: str = ""
    """stop, length, aborted or an error's code."""
    model: str
    """The name under which the model is served."""
    model_id: str
    """Digest of the model's files, or the hub's id and commit."""
    adapter: RecordedAdapter | None = None
    sampling: SamplingParams = SamplingParams()
    """Of all sequences; each has a seed of its own. `logprobs` is at least 0, because workers report them."""
    bad_words: list[str] = []
    """The texts of `sampling.bad_words`, as the client sent them."""
    prompts: list[RecordedPrompt] = []
    num_sequences: int = 0
    workers: list[RecordedWorker] = []


class RecordedSequence(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One line of a record after the first."""

    prompt: int
    """Number of its prompt."""
    seed: int
    finish_reason: FinishReason | None
    """None if the request ended before the sequence did."""
    computed_by: list[tuple[int, int]]
    """(number of a token, number of the worker that computed it and those after it), ascending."""
    token_ids: list[int]
    logprobs: list[float | None]
    """Of each token, under the model's distribution before temperature and filters: the worker's float32 values,
    exactly. None for one that is not finite."""


class Record(msgspec.Struct, frozen=True):
    """A whole record, as `decode_record` returns it."""

    head: RecordHead
    sequences: list[RecordedSequence]


def encode_line(line: RecordHead | RecordedSequence) -> bytes:
    return msgspec.json.encode(line) + b"\n"


def token_numbers(packed: bytes) -> Any:
    """Returns packed token ids for a field of a line that is only encoded, without an object for each token."""
    return _encoded(token_array(packed))


def numbers(values: array[int] | array[float]) -> Any:
    """Returns token ids or log-probabilities for a field of a line that is only encoded."""
    return _encoded(values)


def _encoded(values: array[int] | array[float]) -> msgspec.Raw:
    pieces = [
        # Numbers that are not finite become null.
        msgspec.json.encode(values[start : start + _NUMBERS_PER_PIECE].tolist())[1:-1]
        for start in range(0, len(values), _NUMBERS_PER_PIECE)
    ]
    return msgspec.Raw(b"[" + b",".join(pieces) + b"]")


class _Format(msgspec.Struct):
    format: str


def decode_record(content: bytes) -> Record:
    """Reads a record. Raises DamagedRecord, which says what is wrong, for anything that is not a whole one."""
    if len(content) > MAX_FILE_BYTES:
        raise DamagedRecord(f"it has {len(content)} bytes, more than any record")
    first, _, rest = content.partition(b"\n")
    found = _decoded(first, _Format, "the first line").format
    if found != FORMAT:
        raise DamagedRecord(f"its format is {found[:50]!r}; this release reads {FORMAT}")
    head = _decoded(first, RecordHead, "the first line")
    lines = rest.split(b"\n")
    if lines.pop():
        raise DamagedRecord("its last line is not whole")
    if len(lines) != head.num_sequences:
        raise DamagedRecord(f"it has {len(lines)} of {head.num_sequences} sequences")
    sequences = []
    for number, line in enumerate(lines, start=2):
        sequence = _decoded(line, RecordedSequence, f"line {number}")
        if (problem := _problem(head, sequence)) is not None:
            raise DamagedRecord(f"line {number}: {problem}")
        sequences.append(sequence)
    for prompt in head.prompts:
        if not prompt.token_ids or not _are_tokens(prompt.token_ids):
            raise DamagedRecord("the first line: a prompt has no tokens, or one that no model has")
    return Record(head, sequences)


def _decoded(line: bytes, kind: Any, where: str) -> Any:
    try:
        return msgspec.json.decode(line, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DamagedRecord(f"{where}: {error}") from error


def _problem(head: RecordHead, sequence: RecordedSequence) -> str | None:
    num_tokens = len(sequence.token_ids)
    if not 0 <= sequence.prompt < len(head.prompts):
        return f"there is no prompt {sequence.prompt}"
    if len(sequence.logprobs) != num_tokens:
        return f"it has {num_tokens} tokens, but {len(sequence.logprobs)} log-probabilities"
    if not 0 <= sequence.seed < 2**64:
        return "its seed is not in [0, 2**64)"
    if not _are_tokens(sequence.token_ids):
        return "it has a token that no model has"
    if num_tokens > head.prompts[sequence.prompt].stop.max_tokens:
        return f"it has {num_tokens} tokens, more than its limit"
    starts = [start for start, _ in sequence.computed_by]
    is_ordered = all(one < other for one, other in pairwise(starts))
    if (starts[:1] != [0] and num_tokens) or not is_ordered or not all(0 <= start < num_tokens for start in starts):
        return "computed_by does not say who computed each token"
    if not all(0 <= worker < len(head.workers) for _, worker in sequence.computed_by):
        return "computed_by names a worker that is not listed"
    return None


def _are_tokens(token_ids: Sequence[int]) -> bool:
    return not token_ids or (min(token_ids) >= 0 and max(token_ids) < 2**31)


def as_float32(value: float | None) -> float | None:
    """Returns the float32 value that a record has; None for one that is not finite."""
    if value is None or not math.isfinite(value):
        return None
    return array("f", [value])[0]
