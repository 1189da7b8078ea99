"""Numbers such as `4.0` in fields that take integers: JSON has one kind of number, and some clients write all so."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import inspect


def with_integers(value: Any, form: inspect.Type) -> Any:
    """Returns the decoded JSON with an integer for each number without a fraction where `form` takes no other numbers.

    Values of fields that take any JSON, and text that contains JSON, stay as they are.
    """
    match form:
        case inspect.IntType() if isinstance(value, float) and value.is_integer():
            return int(value)
        case inspect.Metadata(type=inner):
            return with_integers(value, inner)
        case inspect.UnionType(types=types):
            forms = [each.type if isinstance(each, inspect.Metadata) else each for each in types]
            if isinstance(value, float):
                takes_floats = any(isinstance(each, inspect.FloatType | inspect.AnyType) for each in forms)
                integer = next((each for each in forms if isinstance(each, inspect.IntType)), None)
                return value if takes_floats or integer is None else with_integers(value, integer)
            wanted = (inspect.StructType, inspect.DictType) if isinstance(value, dict) else (inspect.ListType,)
            fitting = [each for each in forms if isinstance(each, wanted)]
            return with_integers(value, fitting[0]) if len(fitting) == 1 else value
        case inspect.ListType(item_type=item) if isinstance(value, list):
            return [with_integers(each, item) for each in value]
        case inspect.StructType(fields=fields) if isinstance(value, dict):
            forms_by_name = {field.encode_name: field.type for field in fields}
            return {
                name: with_integers(each, forms_by_name[name]) if name in forms_by_name else each
                for name, each in value.items()
            }
    return value


def decode_whole(decoder: msgspec.json.Decoder[Any], body: bytes) -> Any:
    """Decodes a body whose integers may be written as `4.0`. Raises msgspec.DecodeError, UnicodeError."""
    document = with_integers(msgspec.json.decode(body), inspect.type_info(decoder.type))
    return decoder.decode(msgspec.json.encode(document))
