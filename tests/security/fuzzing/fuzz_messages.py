"""Makes fuzz payloads: random bytes, truncated or modified messages, and well-formed messages without sense."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any, Literal, get_args

import msgspec
import zmq

from tandem.protocol.codec import MAX_MESSAGE_BYTES
from tandem.protocol.messages.membership import PROTOCOL_VERSION

Kind = Literal["random", "cut", "changed", "nonsense", "wrong_direction", "wrong_version", "replayed", "large", "huge"]
KINDS: tuple[Kind, ...] = get_args(Kind)

_INTS = (-(2**63), -(2**31), -1, 0, 1, 2, 3, 63, 64, 65, 255, 1024, 2**31 - 1, 2**31, 2**63 - 1)
_FLOATS = (float("nan"), float("inf"), float("-inf"), -1.0, 0.0, 1e-300, 0.5, 1.0, 10.0, 1e308)
_STRINGS = (
    "",
    "fuzz",
    "fuzz-0",
    "fuzz:0",
    "x" * 300,
    "\0",
    "ipc:///nonexistent/fuzz.sock",
    "tcp://127.0.0.1:1",
    "é\n{}",
)
"""Strings of fuzzed messages; "fuzz" marks every name that is ours."""
_LARGE_BYTES = 1 << 20
_HUGE_BYTES = MAX_MESSAGE_BYTES + 1
"""Exceeds the limit of every socket, which closes the connection before decoding."""


@contextlib.contextmanager
def sender(endpoint: str) -> Iterator[Callable[[list[bytes]], None]]:
    """Yields a function that sends the frames of a message and discards replies."""
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 10_000)
    dealer.setsockopt(zmq.SNDTIMEO, 60_000)

    def send(frames: list[bytes]) -> None:
        dealer.send_multipart(frames)
        with contextlib.suppress(zmq.Again):
            while True:
                dealer.recv_multipart(zmq.NOBLOCK)

    try:
        dealer.connect(endpoint)
        yield send
    finally:
        dealer.close()
        context.term()


class MessageFuzzer:
    """Makes payloads for a socket that expects one of `expected`; `others` are types of other sockets.

    `fixed` gives fields a constant value; the bytes of messages with such a field are never modified.
    """

    def __init__(
        self,
        rng: random.Random,
        expected: tuple[type[Any], ...],
        others: tuple[type[Any], ...],
        fixed: dict[str, Any] | None = None,
    ) -> None:
        self._rng = rng
        self._expected = expected
        self._others = others
        self._fixed = fixed or {}
        self._changed = tuple(kind for kind in expected if not self._fixed_of(kind))
        self._encoder = msgspec.msgpack.Encoder()
        self._sent: list[bytes] = []

    def next(self) -> tuple[Kind, bytes]:
        rng = self._rng
        kind = rng.choices(KINDS, weights=(20, 15, 20, 29, 8, 1, 6, 1, 0.05))[0]
        match kind:
            case "random":
                return kind, rng.randbytes(rng.randrange(200))
            case "cut":
                whole = self._whole(self._expected)
                return kind, whole[: rng.randrange(max(1, len(whole)))]
            case "changed":
                data = bytearray(self._whole(self._changed) or b"\0")
                for _ in range(rng.randint(1, 4)):
                    data[rng.randrange(len(data))] = rng.randrange(256)
                return kind, bytes(data)
            case "nonsense":
                return kind, self._remember(self._whole(self._expected))
            case "wrong_direction":
                return kind, self._whole(self._others)
            case "wrong_version":
                return kind, self._of_another_version()
            case "replayed":
                return kind, rng.choice(self._sent) if self._sent else b""
            case "large":
                return kind, rng.randbytes(rng.randrange(_LARGE_BYTES))
            case "huge":
                return kind, bytes(_HUGE_BYTES)

    def _whole(self, types: tuple[type[Any], ...]) -> bytes:
        kind = self._rng.choice(types)
        return self._encoder.encode(msgspec.structs.replace(random_value(self._rng, kind), **self._fixed_of(kind)))

    def _fixed_of(self, kind: type[Any]) -> dict[str, Any]:
        return {name: value for name, value in self._fixed.items() if name in kind.__struct_fields__}

    def _of_another_version(self) -> bytes:
        """Returns a message with another protocol version, or any valid message if none has a version field."""
        versioned = [kind for kind in self._expected if "version" in kind.__struct_fields__]
        if not versioned:
            return self._whole(self._expected)
        message = random_value(self._rng, self._rng.choice(versioned))
        version = PROTOCOL_VERSION + self._rng.choice((-1, 1, 100))
        return self._encoder.encode(msgspec.structs.replace(message, version=version))

    def _remember(self, data: bytes) -> bytes:
        if len(self._sent) < 100:
            self._sent.append(data)
        else:
            self._sent[self._rng.randrange(100)] = data
        return data


def random_value(rng: random.Random, kind: Any) -> Any:
    """Returns a random value of a message type, often at the limits of its range."""
    return _value(rng, msgspec.inspect.type_info(kind))


def _value(rng: random.Random, info: msgspec.inspect.Type) -> Any:
    def some(make: Callable[[], Any]) -> list[Any]:
        return [make() for _ in range(rng.choice((0, 1, 1, 2, 5)))]

    match info:
        case msgspec.inspect.StructType():
            return info.cls(**{field.name: _value(rng, field.type) for field in info.fields})
        case msgspec.inspect.UnionType():
            return _value(rng, rng.choice(info.types))
        case msgspec.inspect.LiteralType():
            return rng.choice(info.values)
        case msgspec.inspect.BoolType():
            return rng.random() < 0.5
        case msgspec.inspect.IntType():
            return rng.choice(_INTS)
        case msgspec.inspect.FloatType():
            return rng.choice(_FLOATS)
        case msgspec.inspect.StrType():
            return rng.choice(_STRINGS)
        case msgspec.inspect.BytesType():
            return rng.randbytes(rng.choice((0, 1, 3, 4, 8, 16, 32, 64)))
        case msgspec.inspect.NoneType():
            return None
        case msgspec.inspect.ListType():
            return some(lambda: _value(rng, info.item_type))
        case msgspec.inspect.VarTupleType():
            return tuple(some(lambda: _value(rng, info.item_type)))
        case msgspec.inspect.TupleType():
            return tuple(_value(rng, item) for item in info.item_types)
        case msgspec.inspect.FrozenSetType():
            return frozenset(some(lambda: _value(rng, info.item_type)))
        case msgspec.inspect.DictType():
            return dict(some(lambda: (_value(rng, info.key_type), _value(rng, info.value_type))))
        case _:
            raise TypeError(f"no values for {info}")
