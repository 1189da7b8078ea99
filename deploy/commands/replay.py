"""`tandem replay`: computes a recorded answer again and compares it, bit for bit (docs/replay.md).

Alone, each sequence is computed by itself in this process. With a URL, a cluster computes it and records it again, so
that both sides of the comparison are records. Two records of one request can also be compared without computing, which
is all that can be done for images and video: a record has their digests only.
"""

from __future__ import annotations

import re
import sys
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from tandem.deploy.demo_model import DEMO_MODEL
from tandem.protocol.messages.dispatch import AdapterRef
from tandem.proxy.records.record import (
    MAX_FILE_BYTES,
    DamagedRecord,
    NumericsFields,
    Record,
    RecordedMedia,
    RecordedSequence,
    RecordedWorker,
    as_float32,
    decode_record,
)
from tandem.runtime.cores import num_cores
from tandem.runtime.errors import ConfigError, first_line
from tandem.runtime.files.lora_files import InvalidAdapter, read_adapter
from tandem.runtime.files.regular_file import read_regular
from tandem.runtime.files.user_paths import expanded

if TYPE_CHECKING:
    from tandem.worker.lone_engine import LoneEngine

EQUAL, DIFFERS = 0, 1
"""Exit statuses. What cannot be replayed raises ConfigError, whose status is 2."""
MAX_THREADS = 256
_MAX_NAMED_MEDIA, _DIGEST_CHARACTERS = 4, 16
"""Media that an error names, and how much of their digests."""


class Token(NamedTuple):
    """A token of an answer. logprob: a float32 value; None if it is not finite or was not computed."""

    token_id: int
    logprob: float | None

    def __str__(self) -> str:
        return f"{self.token_id} with log-probability {'unknown' if self.logprob is None else repr(self.logprob)}"


class Difference(NamedTuple):
    """The first token of a sequence that was computed differently. computed: None if there was no further token."""

    sequence: int
    number: int
    recorded: Token
    computed: Token | None
    by: RecordedWorker
    """The worker that had computed the recorded one."""
    now_by: RecordedWorker
    """Who has computed it again."""


class Computed(NamedTuple):
    """A token that was computed again, and by whom."""

    token: Token
    by: RecordedWorker


def read_record(file: str) -> Record:
    """Reads a record that can be replayed. file: path, or - for stdin. Raises ConfigError."""
    where = "stdin" if file == "-" else file
    try:
        if file == "-":
            content = sys.stdin.buffer.read(MAX_FILE_BYTES + 1)
        else:
            content = read_regular(expanded(file), MAX_FILE_BYTES)
    except OSError as error:
        raise ConfigError(f"cannot read {where}: {error.strerror}") from error
    try:
        record = decode_record(content)
    except DamagedRecord as error:
        raise ConfigError(f"{where} is not a whole record: {error.message}") from error
    if not any(sequence.token_ids for sequence in record.sequences):
        raise ConfigError(f"{where} has no tokens of an answer to compare ({record.head.outcome or 'no outcome'})")
    return record


def check_computable(record: Record) -> None:
    """Raises ConfigError for an answer that does not follow from the record alone: one about images or video."""
    media = [_named(item) for prompt in record.head.prompts for item in prompt.media]
    if not media:
        return
    more = f" and {len(media) - _MAX_NAMED_MEDIA} more" if len(media) > _MAX_NAMED_MEDIA else ""
    seed = next((f" and the seed {each.seed}" for each in record.sequences), "")
    raise ConfigError(
        f"the answer is about {', '.join(media[:_MAX_NAMED_MEDIA])}{more}, and a record has no images or video, only "
        f"these digests; send the request again with the header X-Tandem-Record: 1{seed}, and compare its record by "
        "--against FILE"
    )


def _named(item: RecordedMedia) -> str:
    return f"the {item.kind} {item.digest[:_DIGEST_CHARACTERS]}"


def replay_alone(record: Record, model: str, device: str, adapters: Sequence[str]) -> int:
    """Computes each sequence by itself in this process. Prints the outcome and returns the exit status.

    model: folder or hub id; empty for the demo model. adapters: NAME=FOLDER. Raises ConfigError for what cannot be
    replayed.
    """
    from tandem.engine.engine_config import EngineConfig
    from tandem.worker.lone_engine import LoneEngine

    head = record.head
    adapter = _adapter(record, adapters)
    numerics = next((worker.numerics for worker in head.workers if worker.numerics), {})
    engine = None
    try:
        config = msgspec.convert(
            {
                "model": str(expanded(model)) if model else str(DEMO_MODEL),
                "device": device,
                **engine_settings(numerics),
            },
            EngineConfig,
        )
        engine = LoneEngine(config)
        if (found := engine.loaded.layout.model_id) != head.model_id:
            raise ConfigError(
                f"the record is of the model {head.model} ({head.model_id}), but {config.model} is another one "
                f"({found}); give its folder as --model"
            )
        return report(record, computed_alone(record, engine, adapter), "alone")
    except ConfigError:
        raise
    except Exception as error:  # a record may have anything in it, and may be of a model with other limits
        raise ConfigError(f"the record cannot be computed: {first_line(error)}") from error
    finally:
        if engine is not None:
            engine.close()


def computed_alone(
    record: Record, engine: LoneEngine, adapter: AdapterRef | None = None
) -> dict[int, Iterator[Computed]]:
    """Returns what the engine computes for each sequence, as far as it is iterated over."""
    head, numerics = record.head, engine.loaded.layout.numerics
    own = RecordedWorker("this process", numerics.digest, msgspec.structs.asdict(numerics))

    def compute(sequence: RecordedSequence) -> Iterator[Computed]:
        prompt = head.prompts[sequence.prompt]
        sampling = msgspec.structs.replace(head.sampling, seed=sequence.seed, logprobs=0, logprob_token_ids=())
        for token in engine.tokens(prompt.token_ids, sampling, prompt.stop, len(sequence.token_ids), adapter):
            logprob = token.logprobs.logprob if token.logprobs is not None else None
            yield Computed(Token(token.token_id, as_float32(logprob)), own)

    return {number: compute(each) for number, each in enumerate(record.sequences)}


def engine_settings(numerics: NumericsFields) -> dict[str, str | int]:
    """Returns the settings by which the engine computes as a worker of these numerics does, as far as they are known.

    numerics: empty if the worker has not said.
    """
    num_threads = numerics.get("num_threads")
    is_usable = isinstance(num_threads, int) and 1 <= num_threads <= MAX_THREADS
    settings: dict[str, str | int] = {"num_threads": num_threads if is_usable and num_threads else num_cores()}
    if (dtype := numerics.get("dtype")) in ("float32", "bfloat16", "float16"):
        settings["dtype"] = dtype
    if str(numerics.get("kv_dtype", "")).startswith("float8"):
        settings["kv_cache_dtype"] = "fp8"
    quantization = str(numerics.get("quantization", ""))
    if quantization.endswith("quantised when loaded"):
        settings["quantization"] = quantization.partition(" ")[0]
    if size := re.search(r"blocks of (\d{1,3})$", str(numerics.get("kernels", ""))):
        settings["block_size"] = int(size[1])
    if numerics:
        settings["exact"] = not numerics.get("problem")
    if isinstance(length := numerics.get("max_model_len"), int) and length > 0:
        settings["max_model_len"] = length
    return settings


def _adapter(record: Record, adapters: Sequence[str]) -> AdapterRef | None:
    """Returns the adapter to load. Raises ConfigError if it was not given, or has changed."""
    wanted = record.head.adapter
    if wanted is None:
        return None
    folders = dict(each.partition("=")[::2] for each in adapters)
    if wanted.name not in folders:
        raise ConfigError(f"the record needs its LoRA adapter; give --lora {wanted.name}=FOLDER")
    folder = expanded(folders[wanted.name]).absolute()
    try:
        found = read_adapter(folder).digest
    except InvalidAdapter as error:
        raise ConfigError(error.message) from error
    if found != wanted.digest:
        raise ConfigError(f"the adapter in {folder} is not that of the record: its files differ")
    return AdapterRef(wanted.digest, str(folder))


def replay_against(record: Record, other: Record) -> int:
    """Compares two records of one request. Prints the outcome and returns the exit status.

    Raises ConfigError if they are of different requests.
    """
    one, two = _asked(record), _asked(other)
    for field, value in one.items():
        if value != two[field]:
            was, is_ = next((a, b) for a, b in zip_longest(value, two[field], fillvalue="none") if a != b)
            raise ConfigError(f"the records are of different requests: {field} was {was!r:.100}, and is {is_!r:.100}")
    return report(record, {number: recorded(other, number) for number in range(len(other.sequences))}, "twice")


def _asked(record: Record) -> dict[str, list[Any]]:
    """Returns what the answer follows from, by names for errors."""
    head = record.head
    return {
        "the model": [head.model_id],
        "the adapter": [head.adapter.digest] if head.adapter is not None else [],
        "an image or video": [f"{item.kind} {item.digest}" for prompt in head.prompts for item in prompt.media],
        "a prompt": [prompt.token_ids for prompt in head.prompts],
        "a place of an image or video": [item.spans for prompt in head.prompts for item in prompt.media],
        "a limit": [prompt.stop for prompt in head.prompts],
        "the sampling": [head.sampling],
        "a seed": [sequence.seed for sequence in record.sequences],
    }


# ---- the comparison


def recorded(record: Record, number: int) -> Iterator[Computed]:
    """Yields the tokens of a recorded sequence, and who computed them."""
    sequence = record.sequences[number]
    tokens = map(Token, sequence.token_ids, sequence.logprobs)
    yield from map(Computed, tokens, _workers(record, sequence))


def first_difference(number: int, record: Record, computed: Iterable[Computed]) -> Difference | None:
    """Returns the first token of sequence `number` that differs, or None if all are equal. Takes no tokens after it."""
    last = RecordedWorker("nobody")
    for place, (one, other) in enumerate(zip_longest(recorded(record, number), computed)):
        if one is None:
            break  # more was computed than recorded
        if other is None:
            return Difference(number, place, one.token, None, one.by, last)
        last = other.by
        if not _are_equal(one.token, other.token):
            return Difference(number, place, one.token, other.token, one.by, last)
    return None


def _workers(record: Record, sequence: RecordedSequence) -> Iterator[RecordedWorker]:
    """Yields who computed each token. A sequence that ended before its first one has none."""
    ends = [start for start, _ in sequence.computed_by[1:]] + [len(sequence.token_ids)]
    for (start, number), end in zip(sequence.computed_by, ends, strict=False):
        for _ in range(start, end):
            yield record.head.workers[number]


def _are_equal(one: Token, other: Token) -> bool:
    return one.token_id == other.token_id and _bits(one.logprob) == _bits(other.logprob)


def _bits(value: float | None) -> bytes:
    return b"" if value is None else array("f", [value]).tobytes()


def numerics_differences(one: NumericsFields, other: NumericsFields) -> list[str]:
    """Returns the fields that differ with both values."""
    fields = [name for name in {**one, **other} if name != "problem" and one.get(name) != other.get(name)]
    return [f"{name} was {one.get(name, '')!r} and is {other.get(name, '')!r}" for name in fields]


def report(record: Record, computed: Mapping[int, Iterable[Computed]], how: str) -> int:
    """Compares all sequences. Prints the outcome and returns the exit status. computed: by number of the sequence."""
    found = [
        difference
        for number in range(len(record.sequences))
        if (difference := first_difference(number, record, computed[number])) is not None
    ]
    for difference in found:
        print("\n".join(lines_of(difference)), flush=True)
    num_sequences, num_tokens = len(record.sequences), sum(len(each.token_ids) for each in record.sequences)
    sequences = f"{num_sequences} sequence{'s' * (num_sequences != 1)}"
    if found:
        print(f"differs: {len(found)} of {sequences}")
        return DIFFERS
    print(f"equal: {sequences}, {num_tokens} tokens, every token and log-probability; computed {how}")
    return EQUAL


def lines_of(difference: Difference) -> list[str]:
    """Describes a difference, and what the numerics say of it."""
    by, now_by = difference.by, difference.now_by
    computed = "no token" if difference.computed is None else str(difference.computed)
    lines = [
        f"sequence {difference.sequence} differs at token {difference.number}:",
        f"  recorded: {difference.recorded} ({by.worker_id})",
        f"  computed: {computed} ({now_by.worker_id})",
    ]
    if not by.numerics or not now_by.numerics:
        silent = by if not by.numerics else now_by
        return [*lines, f"  numerics: {silent.worker_id} has not said what its arithmetic depends on"]
    if differences := numerics_differences(by.numerics, now_by.numerics):
        return [*lines, *(f"  numerics: {each}" for each in differences)]
    problem = by.numerics.get("problem") or now_by.numerics.get("problem")
    reason = f"the answers are not exact: {problem}" if problem else "so the difference is a defect; please report it"
    return [*lines, f"  numerics: equal ({by.numerics_digest}), {reason}"]
