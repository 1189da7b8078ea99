"""Every message survives encoding and decoding; all other bytes are refused."""

from __future__ import annotations

import typing

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.protocol.codec import MAX_MESSAGE_BYTES, Codec
from tandem.protocol.messages.dispatch import DecodeBegan, NewToken, StartPrefill, TokenBatch, ToProxy, ToWorker
from tandem.protocol.messages.membership import FromProxyControl, ToProxyControl
from tandem.protocol.messages.packed import pack_token_ids, unpack_token_ids
from tandem.protocol.messages.sampling import SampledToken, SamplingParams, StopConditions
from tandem.protocol.messages.transfer import ToDecodePeer, ToPrefillPeer
from tandem.runtime.errors import ErrorInfo, InternalError, ProtocolError, WorkerLost

DIRECTIONS = [ToWorker | ToDecodePeer, ToProxy, ToPrefillPeer, ToProxyControl, FromProxyControl]


@pytest.mark.parametrize("direction", DIRECTIONS, ids=str)
@given(data=st.data())
@settings(max_examples=50)
def test_every_message_survives_encoding(direction: typing.Any, data: st.DataObject) -> None:
    message_type = data.draw(st.sampled_from(typing.get_args(direction)))
    message = data.draw(st.from_type(message_type).filter(_encodable))
    codec: Codec[typing.Any] = Codec(direction)
    assert codec.decode(codec.encode(message)) == message


def _encodable(message: msgspec.Struct) -> bool:
    """msgpack integers have 64 bits; NaN is not equal to itself."""
    try:
        encoded = msgspec.msgpack.encode(message)
    except (
        OverflowError,
        UnicodeEncodeError,
        TypeError,
    ):  # TypeError: hypothesis takes a default's factory for a value
        return False
    return message == message and msgspec.msgpack.decode(encoded, type=type(message)) == message


@pytest.mark.parametrize("direction", DIRECTIONS, ids=str)
@given(junk=st.binary(max_size=200))
def test_junk_is_refused(direction: typing.Any, junk: bytes) -> None:
    with pytest.raises(ProtocolError):
        Codec(direction).decode(junk)


@given(data=st.data())
def test_truncated_messages_are_refused(data: st.DataObject) -> None:
    codec: Codec[ToProxy] = Codec(ToProxy)
    whole = codec.encode(TokenBatch([NewToken("r1", SampledToken(5)), NewToken("r2", SampledToken(6), "stop")]))
    with pytest.raises(ProtocolError):
        codec.decode(whole[: data.draw(st.integers(0, len(whole) - 1))])


def test_unknown_fields_and_directions_are_refused() -> None:
    start = StartPrefill(
        "p", ["r"], "t", b"", SamplingParams(), [1], StopConditions(1), 1.0, decode_worker_id=None, decode_epoch=None
    )
    fields = msgspec.msgpack.decode(msgspec.msgpack.encode(start))
    codec: Codec[ToWorker] = Codec(ToWorker)
    with pytest.raises(ProtocolError, match="extra"):
        codec.decode(msgspec.msgpack.encode(fields | {"extra": 1}))
    with pytest.raises(ProtocolError):
        Codec(ToProxy).decode(codec.encode(start))


def test_oversized_messages_are_refused_unread() -> None:
    with pytest.raises(ProtocolError, match="limit"):
        Codec(ToProxy).decode(bytes(MAX_MESSAGE_BYTES + 1))


@given(st.lists(st.integers(0, 2**31 - 1)))
def test_token_ids_survive(token_ids: list[int]) -> None:
    assert unpack_token_ids(pack_token_ids(token_ids)) == token_ids


def test_errors_keep_their_kind() -> None:
    error = ErrorInfo.of(WorkerLost("gone")).to_error()
    assert isinstance(error, WorkerLost) and error.message == "gone"
    assert isinstance(ErrorInfo("from_the_future", "x").to_error(), InternalError)


def test_an_empty_list_of_began_sequences_is_not_encoded() -> None:
    codec: Codec[ToProxy] = Codec(ToProxy)
    tokens = [NewToken("r0", SampledToken(9))]
    assert b"began" not in codec.encode(TokenBatch(tokens))
    began = TokenBatch(tokens, [DecodeBegan("r0", 0.5, 0.25)])
    assert codec.decode(codec.encode(began)) == began
