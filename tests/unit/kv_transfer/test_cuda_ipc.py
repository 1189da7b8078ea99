"""KV transfer between GPUs, as far as it can be tested without one: choice of connector, messages, refusals, runs.

`tests/gpu/test_kv_transfer.py` has the rest.
"""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tandem.kv_transfer.connectors import cuda_ipc
from tandem.kv_transfer.connectors.cuda_ipc import CudaPoolHandle, copy_runs, map_peer_pool, pool_address
from tandem.kv_transfer.connectors.staging import paired_runs
from tandem.kv_transfer.handshake import agree, offered_connectors
from tandem.protocol.codec import Codec
from tandem.protocol.messages.membership import PROTOCOL_VERSION
from tandem.protocol.messages.transfer import (
    KVLayout,
    OpenPair,
    PairAccepted,
    ToPrefillPeer,
)
from tandem.runtime.errors import KVLayoutMismatch, KVTransferFailed
from tests.support.named_connectors import named

LAYOUT = KVLayout("model", "bfloat16", 2, 4, 16, 16)
SPLIT = msgspec.structs.replace(LAYOUT, num_kv_heads=2, tensor_parallel_size=2)
HANDLE = CudaPoolHandle(b"memory", 4096, 0, b"counter", 3, 4)
GPUS = ["ipc", "nccl"]


def offer(**changes: Any) -> OpenPair:
    base = OpenPair(PROTOCOL_VERSION, "prefill-0", "e", [1], "d", "pair", LAYOUT, "here", "cuda", GPUS)
    return msgspec.structs.replace(base, **changes)


def test_auto_offers_what_the_device_allows() -> None:
    assert [*offered_connectors("auto", "cuda")] == ["ipc", "nccl"]
    assert [*offered_connectors("ipc", "cuda")] == ["ipc"]


@pytest.mark.parametrize(("host", "connector"), [("here", "ipc"), ("elsewhere", "nccl")])
@pytest.mark.parametrize("theirs", [LAYOUT, SPLIT])
def test_ipc_on_one_host_and_nccl_between_two(theirs: KVLayout, host: str, connector: str) -> None:
    """Whether the GPUs reach each other is known when one maps the other's memory."""
    assert agree(offer(layout=theirs, host_id=host), LAYOUT, "here", "cuda", named(*GPUS)) == connector


def test_a_pool_on_the_cpu_and_one_on_a_gpu_do_not_pair() -> None:
    """Both devices have a connector called `ipc`."""
    with pytest.raises(KVLayoutMismatch, match=r"prefill offers ipc, nccl on cuda, decode offers ipc, gloo on cpu"):
        agree(offer(), LAYOUT, "here", "cpu", named("ipc", "gloo"))


@given(st.binary(max_size=80), st.integers(0, 2**62))
def test_the_ipc_handle_survives_encoding(handle: bytes, size: int) -> None:
    pool = CudaPoolHandle(handle, size, 512, b"/counter", 7, 3)
    codec: Codec[ToPrefillPeer] = Codec(ToPrefillPeer)
    message = PairAccepted("pair", "ipc", [[msgspec.msgpack.encode(pool), b""], []])
    decoded = codec.decode(codec.encode(message))
    assert decoded == message and isinstance(decoded, PairAccepted)
    assert msgspec.msgpack.decode(decoded.addresses[0][0], type=CudaPoolHandle) == pool


@pytest.mark.parametrize(("address", "words"), [(b"", "does not export memory"), (b"forged", "address cannot be read")])
def test_invalid_handles_are_refused(address: bytes, words: str) -> None:
    with pytest.raises(KVTransferFailed, match=words):
        map_peer_pool(address, torch.device("cuda", 0))


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the handle itself is refused; see tests/gpu")
def test_a_process_without_a_gpu_cannot_map() -> None:
    with pytest.raises(KVTransferFailed, match="cannot map the peer's KV pool"):
        map_peer_pool(msgspec.msgpack.encode(HANDLE), torch.device("cuda", 0))


@pytest.mark.parametrize("own", [torch.device("cuda", 1), torch.device("cuda")])
def test_memory_of_any_gpu_is_mapped_into_the_own_gpus_address_space(
    own: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peer's number of its GPU means nothing here: each process has CUDA_VISIBLE_DEVICES of its own."""
    asked: list[tuple[Any, ...]] = []
    memory = torch.arange(64, dtype=torch.uint8)

    def map_memory(*arguments: Any) -> torch.UntypedStorage:
        asked.append(arguments)
        return memory.untyped_storage()

    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", map_memory)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    make = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *sizes, device, **options: make(*sizes, **options))
    handle = CudaPoolHandle(b"memory", 48, 16, b"counter", 3, 4)
    mapped = map_peer_pool(msgspec.msgpack.encode(handle), own)
    assert asked == [(1, b"memory", 48, 16, b"counter", 3, b"", False)]
    assert mapped.shape == (4, 12) and torch.equal(mapped.flatten(), memory[:48])


def test_a_pool_is_exported_once_and_when_it_has_its_first_content(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer may be on another GPU, where torch's event for this need not work, so the handle has none."""
    calls: list[str] = []

    class Storage:
        def data_ptr(self) -> int:
            return 1

        def _share_cuda_(self) -> tuple[Any, ...]:
            calls.append("export")
            return (5, b"memory", 64, 16, b"counter", 3, b"event", True)

    class Blocks(SimpleNamespace):
        def __len__(self) -> int:
            return 4

    pool: Any = Blocks(device=torch.device("cuda", 0), untyped_storage=Storage)
    monkeypatch.setattr(cuda_ipc, "_addresses", {})
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: calls.append(f"wait for {device}"))
    for _ in range(2):
        assert msgspec.msgpack.decode(pool_address(pool), type=CudaPoolHandle) == CudaPoolHandle(
            b"memory", 64, 16, b"counter", 3, 4
        )
    assert calls == ["wait for cuda:0", "export"]


@given(st.lists(st.integers(0, 19), unique=True, min_size=1), st.randoms())
def test_exactly_the_runs_are_copied(src: list[int], rng: random.Random) -> None:
    dst = rng.sample(range(20), len(src)) if rng.random() < 0.5 else src
    head_bytes = rng.choice([2, 8])  # with 8 the copies move words
    source = torch.arange(20 * 6 * head_bytes).to(torch.uint8).view(20, 3, 2 * head_bytes)
    for view in (slice(None), slice(0, head_bytes)):  # whole blocks, and some heads of each
        target, expected = torch.full_like(source, 255), torch.full_like(source, 255)
        expected[dst, :, view] = source[src][:, :, view]
        copy_runs(source[:, :, view], src, target[:, :, view], dst)
        assert torch.equal(target, expected)
    assert sum(count for _, _, count in paired_runs(src, dst)) == len(src)
