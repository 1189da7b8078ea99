"""Reads JSON of a model's folder as Python's json does, which writes most of it.

Python writes numbers that JSON does not have (`Infinity`, `NaN`) and reads more than the standard allows: halves of
surrogate pairs, a byte order mark, several values under one name (the last one counts). Some files have
integers such as `50.0`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import msgspec.inspect

from tandem.runtime.errors import ConfigError
from tandem.runtime.files.regular_file import read_regular
from tandem.runtime.whole_numbers import with_integers

_MAX_BYTES = 64 << 20

T = TypeVar("T")


def read_model_json(file: Path, kind: type[T]) -> T | None:
    """Returns what the file says, as a `kind`, or None if there is no file. Raises ConfigError."""
    try:
        content = decode_model_json(read_regular(file, _MAX_BYTES))
        return msgspec.convert(with_integers(content, msgspec.inspect.type_info(kind)), kind)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, msgspec.ValidationError) as error:
        raise ConfigError(f"cannot read {file}: {error}") from error


def decode_model_json(content: bytes) -> Any:
    """Raises ValueError if Python's json cannot read it."""
    try:
        return json.loads(content)
    except RecursionError as error:
        raise ValueError(f"it is nested too deeply: {error}") from error
