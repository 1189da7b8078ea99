"""Errors about single fields of a body: which field, what is allowed, and the value that the client sent."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, cast

import msgspec

from tandem.runtime.errors import InvalidRequest
from tandem.runtime.whole_numbers import decode_whole

R = TypeVar("R")
MAX_SHOWN_CHARACTERS = 80
"""Length at which errors cut the values that they show."""
_ERROR_PATH = re.compile(r" - at (?:`key` in )?`\$\.?([^`]*)`$")
_STEP = re.compile(r"\.?([^.\[\]]+)|\[(\d+)\]")
_MISSING_FIELD = re.compile(r"required field `(\w+)`")
_BOUNDS = {">=": "greater_than_equal", "<=": "less_than_equal", ">": "greater_than", "<": "less_than"}
"""Pydantic's names, which clients of vLLM look for in errors about numbers."""
_FLOAT_FOR_INTEGER = re.compile(r"Expected `[^`]*\bint\b[^`]*`, got `float`")
_BOUND = re.compile(r"Expected `(?:int|float)(?: \| null)?` (>=|<=|>|<) ")


def decode_body(decoder: msgspec.json.Decoder[R], body: bytes) -> R:
    """Raises InvalidRequest."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        message = str(error)
        if _FLOAT_FOR_INTEGER.match(message):
            try:
                return cast(R, decode_whole(decoder, body))
            except msgspec.ValidationError as other:
                message = str(other)
            except (msgspec.DecodeError, UnicodeError, RecursionError):
                pass  # the body is malformed behind the field, which the error below tells
        raise _invalid_field(message, body) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"The body is not valid JSON: {error}.") from error


def _invalid_field(message: str, body: bytes) -> InvalidRequest:
    """Returns the error for a body that has the wrong form.

    message: msgspec's, which ends with the path of the field. It does not have the value, so that is looked up in the
    body, which is JSON.
    """
    path = _ERROR_PATH.search(message)
    field = path[1].partition("[...]")[0] if path is not None else ""  # [...] is any member of an object
    message = message if path is None else message[: path.start()]
    if (missing := _MISSING_FIELD.search(message)) is not None:
        param = ".".join(name for name in (field, missing[1]) if name)
        return InvalidRequest(f"{field}: {message}." if field else f"{message}.", param)
    if (bound := _BOUND.match(message)) is not None:
        message = f"{message} ({_BOUNDS[bound[1]]})"
    if not field:
        return InvalidRequest(f"{message}.")
    try:
        value = shown_value(_value_at(field, msgspec.json.decode(body)))
    except (
        msgspec.DecodeError,
        UnicodeDecodeError,
        RecursionError,
    ) as error:  # the body is malformed behind the wrong field
        return InvalidRequest(f"The body is not valid JSON: {error}.")
    except (LookupError, TypeError):  # an object has a key twice, and the other value has another form
        return InvalidRequest(f"{field}: {message}.", field)
    return InvalidRequest(f"{field} is {value}: {message}.", field)


def shown_value(value: Any) -> str:
    """Returns the value as JSON, cut to MAX_SHOWN_CHARACTERS."""
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= MAX_SHOWN_CHARACTERS else f"{text[:MAX_SHOWN_CHARACTERS]}..."


def refuse_unsupported(request: msgspec.Struct, neutral_values: Mapping[str, Sequence[Any]]) -> None:
    """Raises InvalidRequest if a field has another value than its neutral ones, which include null."""
    for field, neutral in neutral_values.items():
        value = getattr(request, field)
        # In Python `0 == False`, but 0 is not a neutral value of a boolean field.
        if not any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in neutral):
            raise InvalidRequest(f"{field} is {shown_value(value)}, which is not supported; leave it out.", field)


def _value_at(path: str, document: Any) -> Any:
    """path: such as `messages[0].content`."""
    for name, index in _STEP.findall(path):
        document = document[int(index)] if index else document[name]
    return document
