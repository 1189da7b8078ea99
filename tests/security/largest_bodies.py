"""The largest bodies that the types of the API allow: one field at a time, derived from the types themselves.

Lists have as many entries as they may, equal ones and ones that differ; texts, patterns, grammars and schemas are
large, deep, repeated or ambiguous. A new field is covered without a change here, and a type that this module does not
know raises TypeError. What these values cost with many sequences, media and clients is for `tests.security.drawn_case`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from msgspec import inspect

SMALL = 4096
"""Length up to which texts have one largest value, and values are repeated in lists."""
ACCEPTED = (20, 128, 1000)
"""Numbers near limits that the types do not show."""
INTERPRETED = ("grammar", "regex", "choice", "json", "chat_template", "content", "prompt", "input", "instructions")
"""Ends of the names of fields whose text is parsed, rendered or tokenised."""


def bodies(
    kind: type[msgspec.Struct], max_bytes: int, fields: Sequence[str] | None = None
) -> Iterator[tuple[str, bytes]]:
    """Yields a name and a body for each largest value of each field, or of some. max_bytes: of a body."""
    body = inspect.type_info(kind)
    assert isinstance(body, inspect.StructType)
    for path, value in _struct(body, max_bytes - 1024, (), fields):
        yield path.lstrip("."), value.encode()


def minimal(kind: inspect.Type, fallback: str = '"a"') -> str:
    """Returns the smallest valid JSON of a type."""
    match kind:
        case inspect.Metadata():
            return msgspec.json.encode(choices[0]).decode() if (choices := _choices(kind)) else minimal(kind.type)
        case inspect.StructType():
            fields = [f'"{field.encode_name}":{minimal(field.type)}' for field in kind.fields if field.required]
            tag = [f'"{kind.tag_field}":"{kind.tag}"'] if kind.tag_field is not None else []
            return "{" + ",".join([*tag, *fields]) + "}"
        case inspect.StrType():
            return '"a"'
        case inspect.LiteralType():
            return msgspec.json.encode(kind.values[0]).decode()
        case inspect.BoolType():
            return "true"
        case inspect.IntType() | inspect.FloatType():
            return "1"
        case inspect.UnionType():
            return minimal(_members(kind)[0])
        case inspect.ListType():
            return "[" + (minimal(kind.item_type) if kind.min_length else "") + "]"
        case inspect.DictType() | inspect.AnyType():
            return "{}"
        case inspect.RawType():
            return fallback
    raise TypeError(f"what is the smallest value of {kind}?")


def filled(kind: inspect.StructType, **given: str) -> str:
    """Returns an object in which each text is "a", so that it is not refused for what it lacks."""
    fields = {field.encode_name: '"a"' for field in kind.fields if _takes_text(field.type)}
    fields |= {field.encode_name: minimal(field.type) for field in kind.fields if field.required} | given
    if kind.tag_field is not None:
        fields[kind.tag_field] = f'"{kind.tag}"'
    return "{" + ",".join(f'"{name}":{value}' for name, value in fields.items()) + "}"


def _takes_text(kind: inspect.Type) -> bool:
    match kind:
        case inspect.Metadata():
            return not _choices(kind) and _takes_text(kind.type)
        case inspect.UnionType():
            return any(map(_takes_text, kind.types))
        case inspect.StrType():
            return kind.pattern is None
    return False


def _choices(kind: inspect.Type) -> list[Any]:
    """Returns the values that the schema lists for a field of a wider type."""
    listed = (kind.extra_json_schema or {}).get("enum", []) if isinstance(kind, inspect.Metadata) else []
    return [value for value in listed if value is not None]


def _members(kind: inspect.UnionType) -> Sequence[inspect.Type]:
    return [each for each in kind.types if not isinstance(each, inspect.NoneType | inspect.CustomType)]


def _struct(
    kind: inspect.StructType, room: int, within: tuple[type, ...], fields: Sequence[str] | None = None
) -> Iterator[tuple[str, str]]:
    rest = minimal(kind)[:-1]
    for field in kind.fields:
        name = field.encode_name
        if fields is not None and name not in fields:
            continue
        begin = f'{rest}{"," if len(rest) > 1 else ""}"{name}":'  # of a key that occurs twice, the last counts
        for path, value in _largest(field.type, room, (*within, kind.cls), name):
            yield f".{name}{path}", begin + value + "}"
        if _contains(field.type, kind.cls):  # e.g. tools of tools
            is_list = not isinstance(field.type, inspect.StructType)
            head, tail = (begin + "[", "]}") if is_list else (begin, "}")
            depth = room // (len(head) + len(tail))
            for levels in (100, 900, depth):
                yield f".{name} {levels} deep", head * levels + minimal(kind) + tail * levels


def _contains(kind: inspect.Type, wanted: type) -> bool:
    match kind:
        case inspect.Metadata():
            return _contains(kind.type, wanted)
        case inspect.UnionType():
            return any(_contains(each, wanted) for each in kind.types)
        case inspect.ListType():
            return _contains(kind.item_type, wanted)
        case inspect.StructType():
            return kind.cls is wanted
    return False


def _largest(kind: inspect.Type, room: int, within: tuple[type, ...], name: str) -> Iterator[tuple[str, str]]:
    """Yields (path, JSON) of the largest values of a type. name: of its field."""
    match kind:
        case inspect.Metadata():
            yield from _largest(kind.type, room, within, name)
        case inspect.NoneType() | inspect.BoolType() | inspect.CustomType():
            return  # unset, or of one size
        case inspect.IntType() | inspect.FloatType():
            yield from _numbers(kind)
        case inspect.LiteralType():
            yield "", msgspec.json.encode(max(kind.values, key=lambda value: len(str(value)))).decode()
        case inspect.StrType():
            yield from _texts(kind, room, name.endswith(INTERPRETED))
            if name.endswith("path"):
                yield from _paths(kind, room)
        case inspect.UnionType():
            for each in _members(kind):
                yield from _largest(each, room, within, name)
        case inspect.ListType():
            yield from _lists(kind, room, within, name)
        case inspect.DictType():
            yield from _dicts(kind, room, within, name)
        case inspect.AnyType():
            yield from _anything(room)
        case inspect.RawType():  # a prompt
            yield from _raws(room)
        case inspect.StructType():
            if kind.cls not in within:
                yield from _struct(kind, room, within)
        case _:
            raise TypeError(f"what is the largest value of {kind}?")


def _numbers(kind: inspect.IntType | inspect.FloatType) -> Iterator[tuple[str, str]]:
    step = 1 if isinstance(kind, inspect.IntType) else 1e-9
    largest = kind.le if kind.le is not None else None if kind.lt is None else kind.lt - step
    smallest = kind.ge if kind.ge is not None else None if kind.gt is None else kind.gt + step
    yield " largest", str(largest if largest is not None else 2**63 - 1 if step == 1 else 1e308)
    yield " smallest", str(smallest if smallest is not None else -(2**63) if step == 1 else -1e308)
    for each in (
        ACCEPTED if step == 1 else ()
    ):  # the largest may be refused at once, and the largest accepted costs most
        if (smallest is None or each >= smallest) and (largest is None or each <= largest):
            yield f" {each}", str(each)


def _texts(kind: inspect.StrType, room: int, is_interpreted: bool) -> Iterator[tuple[str, str]]:
    if kind.pattern is not None:
        yield " of its pattern", '"' + "a" * 128 + '"'
        return
    length = min(kind.max_length or room, room)
    yield " of letters", '"' + "a" * length + '"'
    if length > 2:
        yield " of letters and another", '"' + "a" * (length - 1) + 'b"'  # each further letter may still complete it
    if length <= SMALL:
        return
    yield " of line breaks", '"' + "\\n" * min(length, room // 2) + '"'
    if not is_interpreted:
        return
    for name, piece in (
        (" of blanks", " "),
        (" of words", "lorem ipsum "),
        (" of marks", "<|end|>"),
        (" of surrogates", "\\ud83d\\ude00"),
        (" of parentheses", "("),
        (" of brackets", "["),
        (" of objects", '{\\"a\\":'),
        (" of options", "a? "),
        (" of template loops", "{% for a in b %}"),
    ):
        num_characters = len(msgspec.json.decode(f'"{piece}"'))
        yield name, '"' + piece * min(length // num_characters, room // len(piece)) + '"'
    rule = "\\n".join(f"r{i}: r{i + 1}" for i in range(length // 20))
    yield " of a chain of rules", f'"start: r0\\n{rule}\\n"'
    rule = "\\n".join(f"r{i} ::= r{i + 1}" for i in range(length // 22))
    yield " of a chain of GBNF rules", f'"root ::= r0\\n{rule}\\n"'
    for label, text in ambiguous_texts(length):
        encoded = msgspec.json.encode(text).decode()
        if len(encoded) <= room:
            yield f" of {label}", encoded


def ambiguous_texts(length: int) -> Iterator[tuple[str, str]]:
    """Yields a name and a regular expression or a grammar, of which each letter `a` leaves all ways of reading open."""
    few, some = min(length // 60, 40), min(length // 60, 400)
    yield "nested repetitions", "(" * few + "a" + "+)+" * few
    yield "repetitions in a row", "(a|aa)+" * (length // 8)
    yield "counted repetitions", "(a?){1,50}" * (length // 12)
    yield "a late letter", ".*a" + ".{1,4}" * (length // 8)
    yield "alternatives with one beginning", "|".join("a" * number + "b" for number in range(1, int(length**0.5)))
    for number in (50, 300, (length - 40) // 3):  # the largest are refused at once
        optional = "a? " * number
        yield f"{number} optional terms in Lark", f'start: {optional}\na: "a"\n'
        yield f"{number} optional terms in GBNF", f'root ::= {optional}\na ::= "a"\n'
    for number in sorted({8, some}):  # all of few rules stay possible; many compete
        rules = "".join(f'r{i}: "a" | "a" r{(i + 1) % number} | r{i} "a"\n' for i in range(number))
        choices = " | ".join(f"r{i}" for i in range(number))
        yield f"{number} ambiguous rules in Lark", f"start: ({choices})+\n{rules}"
        rules = "".join(f'r{i} ::= "a" | "a" r{(i + 1) % number}\n' for i in range(number))
        yield f"{number} ambiguous rules in GBNF", f"root ::= ({choices})+\n{rules}"
    yield "a grammar that doubles", 'start: s\ns: s s | "a"\n'


def _paths(kind: inspect.StrType, room: int) -> Iterator[tuple[str, str]]:
    length = min(kind.max_length or room, room)
    yield " of a long name", '"/' + "a" * (length - 1) + '"'
    yield " of many names", '"' + "/a" * (length // 2) + '"'
    yield " of many parents", '"' + "/.." * (length // 3) + '"'
    yield " of zeros", '"/' + "\\u0000" * (length // 2) + '"'


def _lists(kind: inspect.ListType, room: int, within: tuple[type, ...], name: str) -> Iterator[tuple[str, str]]:
    def repeated(item: str) -> tuple[str, str]:
        number = min(kind.max_length or room, room // (len(item) + 1))
        return f" {number} times", "[" + ",".join([item] * number) + "]"

    for label, item in _items(kind.item_type):
        times, value = repeated(item)
        yield f"[]{label}{times}", value
    yield from _unequal(kind, room)
    for path, value in _largest(kind.item_type, room, within, name):
        yield f"[]{path}", f"[{value}]"
        if len(value) < SMALL:
            times, values = repeated(value)
            yield f"[]{path}{times}", values


def _unequal(kind: inspect.ListType, room: int) -> Iterator[tuple[str, str]]:
    """Yields lists of numbers, and of texts, in which no entry equals another."""
    members = _members_of(kind.item_type)
    number = min(kind.max_length or room, room // 8)
    if any(isinstance(each, inspect.IntType) for each in members):
        yield f"[] {number} different numbers", "[" + ",".join(map(str, range(1, number + 1))) + "]"
    for text in members:
        if isinstance(text, inspect.StrType) and text.pattern is None:
            for length in sorted({8, 64, min(text.max_length or 1024, room // 4)}):
                number = min(kind.max_length or room, room // (length + 3))
                texts = ",".join(f'"{"a" * (length - 5)}{i:05}"' for i in range(number))
                yield f"[] {number} texts of {length} with one beginning", f"[{texts}]"


def _members_of(kind: inspect.Type) -> Sequence[inspect.Type]:
    match kind:
        case inspect.Metadata():
            return _members_of(kind.type)
        case inspect.UnionType():
            return [each for member in _members(kind) for each in _members_of(member)]
    return [kind]


def _items(kind: inspect.Type) -> Iterator[tuple[str, str]]:
    """Yields small items of a list, of each of their kinds."""
    match kind:
        case inspect.Metadata():
            yield from _items(kind.type)
        case inspect.UnionType():
            for each in _members(kind):
                yield from _items(each)
        case inspect.StructType():
            yield "", minimal(kind)
            for field in kind.fields:
                for choice in _choices(field.type):
                    encoded = msgspec.json.encode(choice).decode()
                    yield f".{field.encode_name} {choice}", filled(kind, **{field.encode_name: encoded})
        case _:
            yield "", minimal(kind)


def _dicts(kind: inspect.DictType, room: int, within: tuple[type, ...], name: str) -> Iterator[tuple[str, str]]:
    value = minimal(kind.value_type)
    number = min(kind.max_length or room, room // (len(value) + 10))
    yield f" of {number} keys", "{" + ",".join(f'"{i}":{value}' for i in range(number)) + "}"
    for path, largest in _largest(kind.value_type, room, within, name):
        yield f".1{path}", f'{{"1":{largest}}}'
    if isinstance(kind.value_type, inspect.AnyType):
        yield from _schemas(room)


def _schemas(room: int) -> Iterator[tuple[str, str]]:
    """Objects where a JSON schema is expected too."""
    chain = ",".join(f'"d{i}":{{"$ref":"#/$defs/d{i + 1}"}}' for i in range(room // 40))
    yield " a chain of references", f'{{"$ref":"#/$defs/d0","$defs":{{{chain}}}}}'
    for levels in (100, 400, room // 40):
        nested = '{"anyOf":[' * levels + '{"type":"integer"}' + ',{"type":"null"}]}' * levels
        yield f" {levels} alternatives deep", nested
    for keyword in ("anyOf", "oneOf", "allOf", "enum", "properties", "patternProperties"):
        for name, item in SUBSCHEMAS if keyword != "enum" else [("text", '"a%d"')]:
            number = min(room // (len(item) + 12), MAX_SUBSCHEMAS)
            yield f" {keyword} of {number} times {name}", _combined(keyword, item, number)
    yield " a large pattern", '{"type":"string","pattern":"' + "(a|b)*" * (room // 6) + '"}'


MAX_SUBSCHEMAS = 5000
SUBSCHEMAS = [
    ("integer", '{"type":"integer"}'),
    ("object", '{"type":"object"}'),
    ("pattern", '{"type":"string","pattern":"^(.*a){%d}$"}'),
    ("counted pattern", '{"type":"string","pattern":"^a{1,5%d}$"}'),
    ("length", '{"type":"string","minLength":%d}'),
    ("numbers", '{"type":"number","multipleOf":1.%d}'),
    ("list", '{"type":"array","maxItems":%d}'),
    ("required", '{"type":"object","properties":{"p%d":{"type":"string"}},"required":["p"]}'),
]
"""Name and text of what stands below a keyword many times. %d: its number, so that no two are equal."""


def _combined(keyword: str, item: str, number: int) -> str:
    items = [item % each if "%d" in item else item for each in range(1, number + 1)]
    if not keyword.lower().endswith("properties"):
        return f'{{"{keyword}":[' + ",".join(items) + "]}"
    members = ",".join(f'"p{each}":{one}' for each, one in enumerate(items))
    return f'{{"type":"object","{keyword}":{{{members}}}}}'


def _anything(room: int) -> Iterator[tuple[str, str]]:
    yield " of empty lists", "[" + ",".join(["[]"] * (room // 3)) + "]"
    yield " of numbers", "[" + ",".join(["0"] * (room // 2)) + "]"
    yield " of keys", "{" + ",".join(f'"{i}":0' for i in range(room // 11)) + "}"
    yield " of letters", '"' + "a" * room + '"'
    for levels in (100, 900, room // 8):
        yield f" of lists {levels} deep", "[" * levels + "]" * levels
        yield f" of objects {levels} deep", '{"a":' * levels + "0" + "}" * levels


def _raws(room: int) -> Iterator[tuple[str, str]]:
    yield " of letters", '"' + "a" * room + '"'
    yield " of line breaks", '"' + "\\n" * (room // 2) + '"'
    for name, item in (("texts", '"a"'), ("tokens", "1"), ("lists", "[1]"), ("empty lists", "[]"), ("nulls", "null")):
        yield f" of {name}", "[" + ",".join([item] * (room // (len(item) + 1))) + "]"
    yield " nested", "[" * room


def batch_files(max_bytes: int) -> Iterator[tuple[str, bytes]]:
    """Yields a name and the content of input files of batches."""
    from tandem.proxy.batches.batch_lines import Line

    for name, line in bodies(Line, max_bytes):
        yield f"{name} in each line", (line + b"\n") * max(1, max_bytes // (len(line) + 1))
    line = b'{"custom_id":"%d","method":"POST","url":"a","body":{}}\n'
    yield "many lines", b"".join(line % number for number in range(max_bytes // len(line)))
    for name, piece in (
        ("breaks", b"\n"),
        ("blanks", b" \n"),
        ("returns", b"\r\n"),
        ("brackets", b"["),
        ("ends", b"]\n"),
    ):
        yield name, piece * (max_bytes // len(piece))


def adapter_files(max_bytes: int) -> Iterator[tuple[str, bytes, bytes]]:
    """Yields a name, the configuration and the weights of LoRA adapters. max_bytes: of JSON in either."""
    from tandem.runtime.files import lora_files

    values = [*_anything(max_bytes), (" of many digits", "1" + "0" * 4000), (" of some digits", "1" + "0" * 400)]
    values += [(" below 0", "-1"), (" infinite", "Infinity"), (" no number", "NaN"), (" large", "1e308")]
    tensor = '{"dtype":"F32","shape":[1,1],"data_offsets":[0,4]}'
    names = [name for number in range(max_bytes // 200) for name in lora_files.tensor_names(str(number))]
    many = "{" + ",".join(f'"{name}":{tensor}' for name in names) + "}"
    config = '{"peft_type":"LORA","r":1,"lora_alpha":1'
    weights = safetensors('{"a":' + tensor + "}")
    for name, value in values:
        for field in (*lora_files._NEUTRAL_VALUES, "peft_type", "init_lora_weights", "r", "lora_alpha", "use_rslora"):
            yield f"{field}{name}", f'{config},"{field}":{value}}}'.encode(), weights
        yield f"configuration{name}", value.encode(), weights
        yield f"weights{name}", (config + "}").encode(), safetensors(value)
        yield f"a tensor{name}", (config + "}").encode(), safetensors(f'{{"a":{value}}}')
        yield f"a shape{name}", (config + "}").encode(), safetensors(f'{{"a":{{"dtype":"F32","shape":{value}}}}}')
        yield f"a dtype{name}", (config + "}").encode(), safetensors(f'{{"a":{{"dtype":{value},"shape":[]}}}}')
    yield "many tensors", (config + "}").encode(), safetensors(many)


def safetensors(header: str) -> bytes:
    return len(header).to_bytes(8, "little") + header.encode()


def all_structs() -> Any:
    """Returns the types of all bodies that readers read, by kind."""
    from tandem.proxy.api.messages_api.messages_request import CountTokensRequest, MessageRequest
    from tandem.proxy.api.responses_api.responses_request import ResponseRequest
    from tandem.proxy.api.schema import (
        ChatCompletionRequest,
        CompletionRequest,
        DetokenizeRequest,
        EmbeddingRequest,
        TokenizeRequest,
    )

    return {
        "completion": CompletionRequest,
        "chat": ChatCompletionRequest,
        "embedding": EmbeddingRequest,
        "message": MessageRequest,
        "response": ResponseRequest,
        "tokenize": TokenizeRequest,
        "detokenize": DetokenizeRequest,
        "count_tokens": CountTokensRequest,
    }
