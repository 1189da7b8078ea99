"""Messages of the right type with invalid values are refused or harmless; valid messages pass."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import msgspec
import pytest

from tandem.protocol.messages.checks import (
    MAX_CLOSED_PAIRS,
    check_finish_transfer,
    check_open_pair,
    check_register,
    check_request,
    check_reserved,
)
from tandem.protocol.messages.dispatch import PrepareDecode, StartPrefill
from tandem.protocol.messages.membership import (
    PROTOCOL_VERSION,
    RegisterWorker,
    WorkerInfo,
)
from tandem.protocol.messages.numerics import Numerics
from tandem.protocol.messages.packed import pack_token_ids
from tandem.protocol.messages.sampling import SamplingParams, StopConditions
from tandem.protocol.messages.transfer import FinishTransfer, KVLayout, KVReserved, OpenPair, ReservedBlocks
from tandem.runtime.errors import InvalidMessage

VOCAB_SIZE, MAX_MODEL_LEN = 300, 256
START = StartPrefill(
    "p",
    ["r1", "r2"],
    "t",
    pack_token_ids([1, 2, 299]),
    SamplingParams(),
    [1, -(2**63)],
    StopConditions(253),
    1.0,
    decode_worker_id="d",
    decode_epoch="e",
)
PREPARE = PrepareDecode(
    "p",
    ["r1"],
    "t",
    pack_token_ids([1, 2, 3]),
    SamplingParams(),
    [1],
    StopConditions(1),
    -0.5,
    prefill_worker_id="x",
    prefill_epoch="x",
)
OPEN = OpenPair(
    PROTOCOL_VERSION, "p", "e", [1], "d", "pair", KVLayout("m", "float32", 2, 2, 16, 64), "h", "cpu", ["ipc"]
)
REGISTER = RegisterWorker(
    PROTOCOL_VERSION, WorkerInfo("w", "e", "prefill", "ipc:///run/x/w.sock", 7), MAX_MODEL_LEN, VOCAB_SIZE, "m", 64
)
replace = msgspec.structs.replace


@pytest.mark.parametrize("message", [START, PREPARE], ids=lambda m: type(m).__name__)
@pytest.mark.parametrize(
    "change",
    [
        {"attempt_ids": []},
        {"attempt_ids": ["r", "r"], "seeds": [1, 2]},
        {"attempt_ids": [""], "seeds": [1]},
        {"seeds": [1, 2, 3]},
        {"token_ids": b""},
        {"token_ids": b"\0\0\0"},
        {"token_ids": pack_token_ids([VOCAB_SIZE])},
        {"token_ids": b"\xff\xff\xff\xff"},
        {"token_ids": pack_token_ids([1] * 300)},
        {"num_generated": 3},
        {"num_generated": -1},
        {"deadline_s": math.nan},
        {"deadline_s": math.inf},
        {"stop": StopConditions(0)},
        {"stop": StopConditions(10_000)},
        {"priority": 2**40},
        {"sampling": SamplingParams(temperature=math.nan)},
        {"sampling": SamplingParams(temperature=-1.0)},
        {"sampling": SamplingParams(top_p=0.0)},
        {"sampling": SamplingParams(min_p=2.0)},
        {"sampling": SamplingParams(top_k=-1)},
        {"sampling": SamplingParams(repetition_penalty=0.0)},
        {"sampling": SamplingParams(logit_bias=((-1, 1.0),))},
        {"sampling": SamplingParams(logit_bias=((1, math.inf),))},
        {"sampling": SamplingParams(bad_words=((-1,),))},
        {"sampling": SamplingParams(bad_words=((1,), ()))},
        {"sampling": SamplingParams(logprobs=1000)},
    ],
    ids=str,
)
def test_requests_with_invalid_values_are_refused(
    message: StartPrefill | PrepareDecode, change: dict[str, Any]
) -> None:
    check_request(message, VOCAB_SIZE, MAX_MODEL_LEN)
    with pytest.raises(InvalidMessage):
        check_request(replace(message, **change), VOCAB_SIZE, MAX_MODEL_LEN)


@pytest.mark.parametrize(
    "change",
    [
        {"prefill_pids": [0]},
        {"prefill_pids": [-1]},
        {"prefill_pids": [2**40]},
        {"lease_s": 0.0},
        {"lease_s": math.nan},
        {"pair_id": ""},
        {"closed_pair_ids": [""]},
        pytest.param({"closed_pair_ids": ["pair"] * (MAX_CLOSED_PAIRS + 1)}, id="too many closed pairs"),
        {"layout": replace(OPEN.layout, num_kv_heads=-2, tensor_parallel_size=-1)},
        {"layout": replace(OPEN.layout, block_size=0)},
    ],
    ids=str,
)
def test_pairs_with_invalid_values_are_refused(change: dict[str, Any]) -> None:
    check_open_pair(OPEN)
    with pytest.raises(InvalidMessage):
        check_open_pair(replace(OPEN, **change))


@pytest.mark.parametrize(
    "endpoint",
    ["", "tcp://", "tcp://host", "udp://a:1", "ipc://relative", "inproc://zeromq.zap.01", "tcp://a:1\n", "x"],
)
def test_invalid_endpoints_are_refused(endpoint: str) -> None:
    longest = f"ipc:///{106 * 'x'}"
    for good in (
        "ipc:///run/x/w.sock",
        "ipc:///my folder/ü.sock",
        longest,
        "tcp://10.0.0.1:7777",
        "tcp://[::1]:7777",
        "tcp://a-host.example:1",
    ):
        check_register(replace(REGISTER, worker=replace(REGISTER.worker, endpoint=good)))
    with pytest.raises(InvalidMessage):
        check_register(replace(REGISTER, worker=replace(REGISTER.worker, endpoint=endpoint)))


def test_a_registration_with_a_long_name_of_its_engine_is_refused() -> None:
    check_register(replace(REGISTER, engine="vllm 0.32.0"))
    with pytest.raises(InvalidMessage, match="engine: too long"):
        check_register(replace(REGISTER, engine="x" * 5000))


@pytest.mark.parametrize("field", Numerics.__struct_fields__)
def test_numerics_of_absurd_size_are_refused(field: str) -> None:
    is_text = isinstance(getattr(Numerics(), field), str)
    for value, is_valid in (
        [("x" * 4096, True), ("x" * 4097, False)] if is_text else [(1, True), (-1, False), (2**40, False)]
    ):
        numerics = replace(Numerics(), **{field: value})
        with contextlib.nullcontext() if is_valid else pytest.raises(InvalidMessage, match="numerics"):
            check_register(replace(REGISTER, numerics=numerics))
        with contextlib.nullcontext() if is_valid else pytest.raises(InvalidMessage, match="numerics"):
            check_open_pair(replace(OPEN, layout=replace(OPEN.layout, numerics=numerics)))


@pytest.mark.parametrize("first_tokens", [[], [-1], [VOCAB_SIZE], [1] * 2000])
def test_invalid_first_tokens_are_refused(first_tokens: list[int]) -> None:
    check_finish_transfer(FinishTransfer("t", 3, [0, VOCAB_SIZE - 1]), VOCAB_SIZE)
    with pytest.raises(InvalidMessage):
        check_finish_transfer(FinishTransfer("t", 3, first_tokens), VOCAB_SIZE)


@pytest.mark.parametrize(("num_cached", "block_ids"), [(-1, [1]), (0, [-1]), (0, [3, 3]), (0, [2**40])])
def test_invalid_reservations_are_refused(num_cached: int, block_ids: list[int]) -> None:
    check_reserved(KVReserved("t", [ReservedBlocks(0, [0, 1])]))
    with pytest.raises(InvalidMessage):
        check_reserved(KVReserved("t", [ReservedBlocks(num_cached, block_ids)]))
