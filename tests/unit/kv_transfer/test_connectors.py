"""Connectors between two pools in one process, over their real transports; the handshake; arithmetic on block ids."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import random
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tandem.kv_transfer.connector import DataNetwork, Peer
from tandem.kv_transfer.connectors import block_messages, process_group
from tandem.kv_transfer.connectors.addresses import SocketAddress
from tandem.kv_transfer.connectors.block_messages import DIRECT_BLOCK_BYTES, MESSAGE_BYTES, message_plan
from tandem.kv_transfer.connectors.mapped_memory import MappedPool
from tandem.kv_transfer.connectors.staging import is_run, paired_runs
from tandem.kv_transfer.handshake import agree, offered_connectors
from tandem.kv_transfer.registry import load_connector
from tandem.protocol.messages.membership import PROTOCOL_VERSION
from tandem.protocol.messages.numerics import Numerics
from tandem.protocol.messages.transfer import KVLayout, OpenPair
from tandem.runtime.errors import ConfigError, KVLayoutMismatch, KVTransferFailed
from tandem.runtime.host import host_id
from tests.support.named_connectors import named
from tests.support.outcomes import Addresses, Outcomes
from tests.support.waiting import wait_until

NUM_BLOCKS, BLOCK_BYTES = 40, 4096
NETWORK = DataNetwork("127.0.0.1")
LAYOUT = KVLayout("model", "bfloat16", 2, 2, 16, 16)
Call = Callable[[KVTransferFailed | None], None]


@pytest.fixture
def pool_file() -> Iterator[tuple[int, torch.Tensor]]:
    fd = os.memfd_create("test-pool")
    os.ftruncate(fd, NUM_BLOCKS * BLOCK_BYTES)
    mapped = torch.from_file(
        f"/proc/{os.getpid()}/fd/{fd}", shared=True, size=NUM_BLOCKS * BLOCK_BYTES, dtype=torch.uint8
    )
    yield fd, mapped.view(NUM_BLOCKS, BLOCK_BYTES)
    os.close(fd)


def open_receiver(connector: str, destination: torch.Tensor) -> tuple[Any, bytes]:
    addresses = Addresses[bytes]()
    receiver = load_connector(connector).open_receiver("pair", destination, NETWORK, addresses)
    return receiver, addresses.get()


def open_pair(connector: str, pool_file: tuple[int, torch.Tensor]) -> tuple[Any, Any, torch.Tensor, torch.Tensor]:
    _, destination = pool_file
    source = torch.randint(0, 256, (NUM_BLOCKS, BLOCK_BYTES), dtype=torch.uint8)
    receiver, address = open_receiver(connector, destination)
    ready = Outcomes()
    sender = load_connector(connector).open_sender(Peer("pair", address), source, NETWORK, ready)
    assert ready.next() is None
    return sender, receiver, source, destination


@pytest.mark.parametrize(
    ("connector", "direct_bytes"),
    [("ipc", 0), ("tcp", 0), ("gloo", BLOCK_BYTES + 1), ("gloo", BLOCK_BYTES)],
    ids=["ipc", "tcp", "gloo-gathered", "gloo-direct"],
)
def test_blocks_arrive_where_they_should(
    connector: str, direct_bytes: int, pool_file: tuple[int, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(DIRECT_BLOCK_BYTES, "gloo", direct_bytes)
    sender, receiver, source, destination = open_pair(connector, pool_file)
    rng = random.Random(0)
    sent, received = Outcomes(), Outcomes()
    expected = destination.clone()
    for _ in range(20):
        count = rng.randint(1, 12)
        start = rng.randrange(NUM_BLOCKS - count)
        src = rng.sample(range(NUM_BLOCKS), count) if rng.random() < 0.5 else list(range(start, start + count))
        dst = rng.sample(range(NUM_BLOCKS), count) if rng.random() < 0.5 else list(range(start, start + count))
        expected[dst] = source[src]
        if not load_connector(connector).one_sided:
            receiver.receive(dst, received)
            sender.send(src, dst, sent)
        else:
            sender.send(src, dst, sent)
            receiver.receive(dst, received)
        assert sent.next() is None and received.next() is None
        assert torch.equal(destination, expected)
    closed = Outcomes()
    sender.close(lambda: closed(None))
    closed.next()
    receiver.close()
    sender.send([0], [0], sent)
    error = sent.next()
    assert error is not None and "closed" in error.message


@pytest.mark.parametrize("connector", ["tcp", "gloo"])
def test_a_peer_that_exits_fails_the_transfer(connector: str, pool_file: tuple[int, torch.Tensor]) -> None:
    """Without a receiver, the sender's deadline ends the job and the jobs queued after it."""
    sender, receiver, _, _ = open_pair(connector, pool_file)
    receiver.close()
    outcomes, got = Outcomes(), Outcomes()
    receiver.receive([1], got)
    assert got.next() is not None
    del receiver
    big = [i % NUM_BLOCKS for i in range(NUM_BLOCKS)] * 200
    sender.send(big, big, outcomes)
    sender.send([0], [0], outcomes)
    assert outcomes.next() is not None and outcomes.next() is not None
    sender.close(lambda: None)


@pytest.mark.parametrize("connector", ["ipc", "tcp", "gloo"])
def test_preparing_allocates_pages_and_changes_no_content(connector: str, pool_file: tuple[int, torch.Tensor]) -> None:
    sender, receiver, source, destination = open_pair(connector, pool_file)
    destination[5] = 7  # its page is already mapped
    num_before = os.fstat(pool_file[0]).st_blocks
    sender.prepare([4, 5, 6, 20])
    sent, received = Outcomes(), Outcomes()
    if connector != "ipc":
        receiver.receive([5], received)
    sender.send([0], [5], sent)
    assert sent.next() is None
    if connector == "ipc":
        num_pages = (os.fstat(pool_file[0]).st_blocks - num_before) * 512 // mmap.PAGESIZE
        assert num_pages == 3 and not destination[[4, 6, 20]].any()
    else:
        assert received.next() is None
    assert torch.equal(destination[5], source[0])
    sender.close(lambda: None)
    receiver.close()


def num_mapped_pages(tensor: torch.Tensor) -> int:
    """Returns how many of the memory's pages are mapped: bit 63 of each pagemap entry."""
    with Path("/proc/self/pagemap").open("rb") as pagemap:
        pagemap.seek(tensor.data_ptr() // mmap.PAGESIZE * 8)
        entries = pagemap.read(-(-tensor.nbytes // mmap.PAGESIZE) * 8)
    return sum(entry >> 7 for entry in entries[7::8])


def test_pages_that_arrived_are_mapped_before_they_are_read(pool_file: tuple[int, torch.Tensor]) -> None:
    sender, receiver, _, destination = open_pair("ipc", pool_file)
    blocks = list(range(NUM_BLOCKS))
    sent, received, mapped = Outcomes(), Outcomes(), Outcomes()
    sender.send(blocks, blocks, sent)
    assert sent.next() is None and num_mapped_pages(destination) == 0, "only the sender's mapping was written"
    for _ in range(2):
        receiver.receive(blocks, received)
        assert received.next() is None
    receiver._thread.submit(lambda: None, mapped)
    assert mapped.next() is None
    assert num_mapped_pages(destination) == NUM_BLOCKS * BLOCK_BYTES // mmap.PAGESIZE
    sender.close(lambda: None)
    receiver.close()


def test_mapping_refuses_a_pool_that_is_too_small(pool_file: tuple[int, torch.Tensor]) -> None:
    fd, _ = pool_file
    larger = MappedPool(f"/proc/{os.getpid()}/fd/{fd}", NUM_BLOCKS * BLOCK_BYTES + 1, NUM_BLOCKS)
    with pytest.raises(KVTransferFailed, match="smaller"):
        open_sender_to(larger)
    with pytest.raises(KVTransferFailed, match="cannot map"):
        open_sender_to(MappedPool(f"/proc/{os.getpid()}/fd/100000", 10, 1))


def open_sender_to(address: Any, connector: str = "ipc") -> KVTransferFailed | None:
    """Returns what the sender reports. Raises KVTransferFailed if it cannot be opened."""
    encoded, ready = address if isinstance(address, bytes) else msgspec.msgpack.encode(address), Outcomes()
    blocks = torch.zeros(1, BLOCK_BYTES, dtype=torch.uint8)
    sender = load_connector(connector).open_sender(Peer("pair", encoded), blocks, NETWORK, ready)
    error = ready.next()
    sender.close(lambda: None)
    return error


@pytest.mark.parametrize(
    "forged",
    [
        MappedPool("FILE", 0, 0),
        MappedPool("FILE", 10, 0),
        MappedPool("FILE", -10, 1),
        MappedPool("FILE", 10, -1),
        MappedPool("FILE", 10, 3),
        MappedPool("FILE", 2**62, 1),
        SocketAddress("127.0.0.1", 1),
        b"",
        b"\xc1",
    ],
    ids=str,
)
def test_a_forged_address_of_a_mapped_pool_fails_the_pair(forged: Any, pool_file: tuple[int, torch.Tensor]) -> None:
    if isinstance(forged, MappedPool) and forged.file == "FILE":
        forged = msgspec.structs.replace(forged, file=f"/proc/{os.getpid()}/fd/{pool_file[0]}")
    with pytest.raises(KVTransferFailed):
        open_sender_to(forged)


def test_only_descriptors_of_processes_are_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "blocks"
    file.write_bytes(bytes(BLOCK_BYTES))
    for name in (str(file), f"/proc/{os.getpid()}/cwd/blocks", f"/proc/{os.getpid()}/fd/../cwd/blocks"):
        with pytest.raises(KVTransferFailed, match="pool cannot be"):
            open_sender_to(MappedPool(name, BLOCK_BYTES, 1))


@pytest.mark.parametrize("connector", ["tcp", "gloo"])
@pytest.mark.parametrize(
    "forged", [SocketAddress("127.0.0.1", 1), SocketAddress("127.0.0.1", 70_000), SocketAddress("\0", 1), b"", b"\xc1"]
)
def test_a_forged_address_of_a_socket_fails_the_pair(
    connector: str, forged: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_group, "CONNECT_TIMEOUT_S", 0.1)
    assert open_sender_to(forged, connector) is not None


def test_a_closed_path_over_gloo_leaves_no_store_behind(pool_file: tuple[int, torch.Tensor]) -> None:
    receiver, address = open_receiver("gloo", pool_file[1])
    ready = Outcomes()
    source = torch.zeros(NUM_BLOCKS, BLOCK_BYTES, dtype=torch.uint8)
    sender = load_connector("gloo").open_sender(Peer("pair", address), source, NETWORK, ready)
    assert ready.next() is None
    server = msgspec.msgpack.decode(address, type=SocketAddress)
    with socket.create_connection((server.host, server.port)):
        pass
    sender.close(lambda: None)
    receiver.close()
    del receiver

    def is_gone() -> bool:
        with contextlib.suppress(ConnectionRefusedError), socket.create_connection((server.host, server.port)):
            return False
        return True

    wait_until(is_gone, 10)


def offer(**changes: Any) -> OpenPair:
    base = OpenPair(PROTOCOL_VERSION, "prefill-0", "e", [1], "d", "pair", LAYOUT, host_id(), "cpu", ["ipc", "gloo"])
    return msgspec.structs.replace(base, **changes)


def test_handshake_chooses() -> None:
    both = named("ipc", "gloo")
    assert agree(offer(), LAYOUT, host_id(), "cpu", both) == "ipc"
    assert agree(offer(host_id="elsewhere"), LAYOUT, host_id(), "cpu", both) == "gloo"
    assert agree(offer(connectors=["gloo"]), LAYOUT, host_id(), "cpu", both) == "gloo"


@pytest.mark.parametrize(
    "field", [each for each in KVLayout.__struct_fields__ if each not in ("numerics", "immovable")]
)
def test_handshake_names_the_field_that_differs(field: str) -> None:
    value = getattr(LAYOUT, field)
    other = msgspec.structs.replace(LAYOUT, **{field: value + "x" if isinstance(value, str) else value + 1})
    shown = "total_kv_heads" if field in ("num_kv_heads", "tensor_parallel_size") else field
    with pytest.raises(KVLayoutMismatch, match=shown) as caught:
        agree(offer(layout=other), LAYOUT, host_id(), "cpu", named("ipc"))
    assert str(getattr(LAYOUT, shown)) in caught.value.message and str(getattr(other, shown)) in caught.value.message


@pytest.mark.parametrize("is_own", [True, False])
def test_handshake_refuses_what_does_not_move_with_the_reason(is_own: bool) -> None:
    fixed = msgspec.structs.replace(LAYOUT, immovable="blocks of unequal sizes")
    ours, theirs = (fixed, LAYOUT) if is_own else (LAYOUT, fixed)
    with pytest.raises(KVLayoutMismatch, match="does not move between workers: blocks of unequal sizes"):
        agree(offer(layout=theirs), ours, host_id(), "cpu", named("ipc"))


def test_handshake_refuses_another_type_of_the_cache_and_names_both() -> None:
    """`engine.loading.model_loader` gives FP8 caches another model id, too."""
    fp8 = msgspec.structs.replace(LAYOUT, dtype="float8_e4m3fn", model_id="model+bfloat16 as float8_e4m3fn")
    with pytest.raises(KVLayoutMismatch, match="in dtype: prefill has float8_e4m3fn, decode has bfloat16"):
        agree(offer(layout=fp8), LAYOUT, host_id(), "cpu", named("ipc"))
    with pytest.raises(KVLayoutMismatch, match="in dtype: prefill has bfloat16, decode has float8_e4m3fn"):
        agree(offer(), fp8, host_id(), "cpu", named("ipc"))
    assert agree(offer(layout=fp8), fp8, host_id(), "cpu", named("ipc")) == "ipc"


def test_handshake_refuses_another_engine_and_another_version_of_it() -> None:
    """An engine arranges the values of a block in its own way; the other fields of the layout may agree."""
    tandem, old, new = (
        msgspec.structs.replace(LAYOUT, engine=each) for each in ("tandem", "vllm 0.32.0", "vllm 0.33.0")
    )
    for theirs, ours in ((tandem, old), (old, tandem), (old, new)):
        reason = f"KV layout differs in engine: prefill has {theirs.engine}, decode has {ours.engine}"
        with pytest.raises(KVLayoutMismatch, match=reason):
            agree(offer(layout=theirs), ours, host_id(), "cpu", named("ipc"))
    assert agree(offer(layout=old), old, host_id(), "cpu", named("ipc")) == "ipc"


@pytest.mark.parametrize("exact_sides", [(True, False), (False, True), (True, True)], ids=str)
@pytest.mark.parametrize("field", Numerics.__struct_fields__)
def test_handshake_of_exact_workers_names_what_differs_in_their_numerics(
    field: str, exact_sides: tuple[bool, bool]
) -> None:
    value = getattr(Numerics(), field)
    numerics = msgspec.structs.replace(Numerics(), **{field: "other" if isinstance(value, str) else value + 1})
    theirs = msgspec.structs.replace(LAYOUT, numerics=numerics)
    arguments = (LAYOUT, host_id(), "cpu", named("ipc"))
    assert agree(offer(layout=theirs), *arguments) == "ipc"
    exact_prefill, exact_decode = exact_sides
    other = getattr(numerics, field)
    reason = f"their {field} differs: prefill has {other}, decode has {value if value != '' else 'none'}"
    with pytest.raises(KVLayoutMismatch, match=reason):
        agree(offer(layout=theirs, exact=exact_prefill), *arguments, exact_decode)
    assert agree(offer(exact=exact_prefill), *arguments, exact_decode) == "ipc"


def test_handshake_lets_workers_of_different_numbers_of_ranks_pair() -> None:
    split = msgspec.structs.replace(LAYOUT, num_kv_heads=1, tensor_parallel_size=2)
    assert agree(offer(layout=split), LAYOUT, host_id(), "cpu", named("ipc")) == "ipc"
    assert agree(offer(), split, host_id(), "cpu", named("gloo")) == "gloo"


def test_handshake_refuses_other_versions_and_no_common_connector() -> None:
    with pytest.raises(KVLayoutMismatch, match="prefill has 99, decode"):
        agree(offer(version=99), LAYOUT, host_id(), "cpu", named("ipc"))
    with pytest.raises(KVLayoutMismatch, match="no connector in common"):
        agree(offer(connectors=["ipc"], host_id="elsewhere"), LAYOUT, host_id(), "cpu", named("ipc", "gloo"))


def test_handshake_refuses_another_device_and_names_both() -> None:
    with pytest.raises(KVLayoutMismatch, match=r"prefill offers nccl on cuda, decode offers ipc, gloo on cpu"):
        agree(offer(device="cuda", connectors=["nccl"]), LAYOUT, host_id(), "cpu", named("ipc", "gloo"))


def test_unknown_connectors_list_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="unknown connector 'pigeon'; known are auto, ipc, nixl, tcp, gloo, nccl"):
        offered_connectors("pigeon", "cpu")
    with pytest.raises(ConfigError, match="nccl"):
        offered_connectors("gloo", "cuda")
    with pytest.raises(ConfigError, match=r"nccl.* cpu"):
        offered_connectors("nccl", "cpu")
    of_vllm = ("ipc", "nixl", "tcp")
    with pytest.raises(ConfigError, match=r"'tcp' does not work on cuda; use ipc (or nixl )?\("):
        offered_connectors("tcp", "cuda", known=of_vllm)
    assert {"ipc"} <= offered_connectors("auto", "cuda", known=of_vllm).keys() <= {"ipc", "nixl"}


ids = st.lists(st.integers(0, 30), unique=True, max_size=30)


@given(ids, st.randoms())
def test_runs_cover_everything_once_and_are_maximal(src: list[int], rng: random.Random) -> None:
    dst = src.copy()
    rng.shuffle(dst)
    runs = list(paired_runs(src, dst)) if src else []
    flat = [(s + i, d + i) for s, d, count in runs for i in range(count)]
    assert flat == list(zip(src, dst, strict=True))
    for (s1, d1, c1), (s2, d2, _) in itertools.pairwise(runs):
        assert (s1 + c1, d1 + c1) != (s2, d2)


@given(ids)
def test_is_run(block_ids: list[int]) -> None:
    assert is_run(block_ids) == (
        block_ids == list(range(block_ids[0], block_ids[0] + len(block_ids))) if block_ids else True
    )


@given(st.sampled_from(["gloo", "nccl"]), st.integers(1, 1 << 28))
def test_messages_are_few_and_limited_in_size(backend: str, block_bytes: int) -> None:
    num_blocks, num_buffers = message_plan(backend, block_bytes)
    assert num_blocks >= 1 and num_buffers >= (2 if backend == "gloo" else 1)
    assert num_blocks * block_bytes <= max(block_bytes, MESSAGE_BYTES[backend])
    assert num_buffers * num_blocks * block_bytes <= max(2 * block_bytes, 4 * MESSAGE_BYTES[backend])


def test_large_blocks_are_sent_without_a_copy() -> None:
    assert message_plan("gloo", 64 << 10) == (64, 2)
    assert message_plan("gloo", 1 << 20) == (1, 8)
    assert message_plan("nccl", 2 << 20) == (8, 1)


def test_nothing_arrives_over_gloo_after_an_error_was_reported(
    pool_file: tuple[int, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_messages, "message_plan", lambda *arguments: (1, 4))  # into the pool, without staging
    sender, receiver, _, destination = open_pair("gloo", pool_file)
    mistake = ValueError("a mistake in the middle of a receive")  # held here with its traceback, and all variables
    start, num_started = receiver._group._start, 0

    def fail_at_the_third(data: torch.Tensor) -> Any:
        nonlocal num_started
        num_started += 1
        if num_started == 3:
            raise mistake
        return start(data)

    receiver._group._start = fail_at_the_third
    done = Outcomes()
    receiver.receive([1, 3, 5, 7], done)
    error = done.next()
    assert error is not None and "mistake" in error.message
    before = destination.clone()
    sender.send([0, 2, 4, 6], [], done)
    done.next()  # small blocks may leave before the sender learns that the receiver has gone
    assert torch.equal(destination, before)
    sender.close(lambda: None)
    receiver.close()
