"""KV transfer between GPUs, as far as it can be tested without one: choice of connector, messages, refusals, runs.

`tests/gpu/test_kv_transfer.py` has the rest.
"""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tandem.kv_transfer.connector import DataNetwork
from tandem.kv_transfer.connectors.block_runs import paired_runs
from tandem.kv_transfer.connectors.cuda_ipc import copy_runs, device_id, map_peer_pool
from tandem.kv_transfer.handshake import agree, offered_connectors
from tandem.kv_transfer.ranks.rank_pool import RankPool
from tandem.protocol.codec import Codec
from tandem.protocol.messages.membership import PROTOCOL_VERSION
from tandem.protocol.messages.transfer import (
    ConnectorParams,
    CudaPoolHandle,
    KVLayout,
    OpenPair,
    PairAccepted,
    ToPrefillPeer,
)
from tandem.runtime.errors import KVLayoutMismatch, KVTransferFailed

LAYOUT = KVLayout("model", "bfloat16", 2, 4, 16, 16)
SPLIT = msgspec.structs.replace(LAYOUT, num_kv_heads=2, tensor_parallel_size=2)
HANDLE = CudaPoolHandle(b"memory", 4096, 0, b"counter", 3, b"event", True)
GPUS = ["ipc", "nccl"]


def offer(device_ids: list[str], **changes: Any) -> OpenPair:
    base = OpenPair(PROTOCOL_VERSION, "prefill-0", "e", [1], "pair", LAYOUT, "here", "cuda", GPUS)
    return msgspec.structs.replace(base, device_ids=device_ids, **changes)


def test_auto_offers_what_the_device_allows() -> None:
    assert offered_connectors("auto", "cuda") == ["ipc", "nccl"]
    assert offered_connectors("ipc", "cuda") == ["ipc"]


@pytest.mark.parametrize(
    ("theirs", "host", "ours", "connector"),
    [
        (["GPU-a"], "here", ["GPU-a"], "ipc"),
        (["GPU-a"], "here", ["GPU-b"], "nccl"),
        (["GPU-a"], "elsewhere", ["GPU-b"], "nccl"),
        (["GPU-a"], "elsewhere", ["GPU-a"], "nccl"),  # no memory is shared between hosts, whatever the names
    ],
)
def test_ipc_on_one_gpu_and_nccl_between_two(theirs: list[str], host: str, ours: list[str], connector: str) -> None:
    assert agree(offer(theirs, host_id=host), LAYOUT, "here", "cuda", GPUS, ours) == connector


def test_with_several_ranks_every_path_must_stay_on_its_gpu() -> None:
    def choose(theirs: list[str], ours: list[str]) -> str:
        return agree(offer(theirs, layout=SPLIT), SPLIT, "here", "cuda", GPUS, ours)

    assert choose(["GPU-a", "GPU-b"], ["GPU-a", "GPU-b"]) == "ipc"
    assert choose(["GPU-a", "GPU-b"], ["GPU-b", "GPU-a"]) == "nccl"
    assert agree(offer(["GPU-a", "GPU-b"], layout=SPLIT), LAYOUT, "here", "cuda", GPUS, ["GPU-a"]) == "nccl"
    assert agree(offer(["GPU-a", "GPU-a"], layout=SPLIT), LAYOUT, "here", "cuda", GPUS, ["GPU-a"]) == "ipc"


def test_ipc_between_two_gpus_is_refused_and_names_them() -> None:
    with pytest.raises(KVLayoutMismatch, match=r"on different GPUs of the same host\): prefill offers ipc on cuda"):
        agree(offer(["GPU-a"], connectors=["ipc"]), LAYOUT, "here", "cuda", GPUS, ["GPU-b"])


@given(st.binary(max_size=80), st.integers(0, 2**62), st.binary(max_size=80), st.booleans())
def test_the_ipc_handle_survives_encoding(handle: bytes, size: int, event: bytes, waits: bool) -> None:
    pool = CudaPoolHandle(handle, size, 512, b"/counter", 7, event, waits)
    params = ConnectorParams(1, 0, size, 3, "GPU-a", pool)
    codec: Codec[ToPrefillPeer] = Codec(ToPrefillPeer)
    message = PairAccepted("pair", "epoch", "ipc", [params, ConnectorParams()])
    assert codec.decode(codec.encode(message)) == message


@pytest.mark.parametrize(
    ("params", "words"),
    [
        (ConnectorParams(1, 5, 4096, 4), "not on a GPU"),
        (ConnectorParams(1, 0, 8192, 4, "GPU-a", HANDLE), "smaller than the 8192 bytes"),
    ],
)
def test_invalid_handles_are_refused(params: ConnectorParams, words: str) -> None:
    with pytest.raises(KVTransferFailed, match=words):
        map_peer_pool(params, torch.device("cuda", 0))


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the handle itself is refused; see tests/gpu")
def test_a_process_without_a_gpu_cannot_map() -> None:
    with pytest.raises(KVTransferFailed, match="cannot map the peer's KV pool"):
        map_peer_pool(ConnectorParams(1, 0, 4096, 4, "GPU-a", HANDLE), torch.device("cuda", 0))


def test_a_pool_on_cpu_has_no_handle() -> None:
    pool = RankPool(0, LAYOUT, torch.zeros(4, 16, dtype=torch.uint8), DataNetwork("127.0.0.1"))
    params = ConnectorParams(1, 5, 64, 4)
    assert pool.located(params) == params
    assert device_id(torch.device("cpu")) == ""


@given(st.lists(st.integers(0, 19), unique=True, min_size=1), st.randoms())
def test_exactly_the_runs_are_copied(src: list[int], rng: random.Random) -> None:
    dst = rng.sample(range(20), len(src)) if rng.random() < 0.5 else src
    source = torch.arange(20 * 6, dtype=torch.uint8).view(20, 3, 2)
    for view in (slice(None), slice(0, 1)):  # whole blocks, and some heads of each
        target, expected = torch.full_like(source, 255), torch.full_like(source, 255)
        expected[dst, :, view] = source[src][:, :, view]
        copy_runs(source[:, :, view], src, target[:, :, view], dst)
        assert torch.equal(target, expected)
    assert sum(count for _, _, count in paired_runs(src, dst)) == len(src)
