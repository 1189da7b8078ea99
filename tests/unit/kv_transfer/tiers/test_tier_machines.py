"""Random schedules for both tiers, against a model: uses, evictions, restarts, writers killed at any byte, damage."""

from __future__ import annotations

import os
import tempfile
from collections import OrderedDict
from io import FileIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tandem.kv_transfer.tiers import disk
from tandem.kv_transfer.tiers.block_record import HEADER_BYTES
from tandem.kv_transfer.tiers.disk import DiskTier
from tandem.kv_transfer.tiers.host_memory import HostMemoryTier
from tests.unit.kv_transfer.tiers.stored_blocks import (
    BLOCK_BYTES,
    DISK_RECORD_BYTES,
    IDENTITY,
    OTHER_IDENTITY,
    files_below,
    get,
    hash_of,
    held,
    host_bytes,
    put,
)

NUMBERS = range(10)
NUM_SLOTS = 4
numbers = st.sampled_from(NUMBERS)


class Killed(BaseException):
    """Stands for SIGKILL: no code of the tier runs after it."""


class HostMachine(RuleBasedStateMachine):
    """model: block numbers in the order of their use. It predicts exactly what the tier holds."""

    def __init__(self) -> None:
        super().__init__()
        self.fd = os.memfd_create("test-host-machine")
        self.model: OrderedDict[int, None] = OrderedDict()
        self.known: set[bytes] = set()
        self.flipped: set[tuple[int, int]] = set()
        self.open()

    def open(self) -> None:
        self.tier = HostMemoryTier(f"/proc/{os.getpid()}/fd/{self.fd}", host_bytes(NUM_SLOTS), IDENTITY, BLOCK_BYTES)
        self.tier.open()
        self.known = set()

    @rule(number=numbers)
    def store(self, number: int) -> None:
        put(self.tier, number)
        if number not in self.model and len(self.model) == NUM_SLOTS:
            self.model.popitem(last=False)
        self.model[number] = None
        self.model.move_to_end(number)

    @rule(number=numbers)
    def load(self, number: int) -> None:
        assert get(self.tier, number) == (number in self.model)
        if number in self.model:
            self.model.move_to_end(number)

    @rule(wanted=st.lists(numbers))
    def find(self, wanted: list[int]) -> None:
        expected = next((at for at, number in enumerate(wanted) if number not in self.model), len(wanted))
        assert self.tier.find([hash_of(number) for number in wanted]) == expected

    @rule()
    def clear(self) -> None:
        self.tier.clear()
        self.model.clear()

    @rule()
    def restart(self) -> None:
        self.tier.close()
        self.open()

    @rule(number=numbers, num_bytes=st.integers(0, 3 * HEADER_BYTES + BLOCK_BYTES))
    def die_while_storing(self, number: int, num_bytes: int) -> None:
        """The worker is killed after it has written `num_bytes`."""
        if number in self.model:
            return
        write = self.tier._write

        def write_until_killed(offset: int, data: memoryview) -> None:
            nonlocal num_bytes
            write(offset, data[:num_bytes])
            num_bytes -= len(data)
            if num_bytes < 0:
                raise Killed

        victim = next(iter(self.model)) if len(self.model) == NUM_SLOTS else None
        with patch.object(self.tier, "_write", write_until_killed):
            try:
                put(self.tier, number)
            except Killed:
                is_complete = False
            else:
                is_complete = True
        self.open()
        found = held(self.tier, *NUMBERS)
        assert set(self.model) - {victim} <= set(found) <= {*self.model, number}
        assert number in found or not is_complete
        if victim is not None and victim not in found:
            del self.model[victim]
        if number in found:
            assert get(self.tier, number)
            self.model[number] = None

    @rule(data=st.data(), is_restarted=st.booleans())
    def flip_a_bit(self, data: st.DataObject, is_restarted: bool) -> None:
        place = data.draw(st.integers(0, host_bytes(NUM_SLOTS) - 1))
        bit = data.draw(st.integers(0, 7))
        if (place, bit) in self.flipped:
            return  # it may undo the damage: the block is then found again after a restart, as it should be
        self.flipped.add((place, bit))
        os.pwrite(self.fd, bytes([os.pread(self.fd, 1, place)[0] ^ 1 << bit]), place)
        if is_restarted:
            self.restart()
        lost = [number for number in self.model if not get(self.tier, number)]  # uses them in the model's order
        assert len(lost) <= 1
        for number in lost:
            del self.model[number]

    @invariant()
    def changes_lead_to_what_is_held(self) -> None:
        changes = self.tier.changes.take()
        self.known = (self.known | set(changes.added)) - set(changes.removed)
        assert self.known == {hash_of(number) for number in self.model}
        assert held(self.tier, *NUMBERS) == sorted(self.model)
        assert self.tier.num_bytes == len(self.model) * (HEADER_BYTES + BLOCK_BYTES) <= self.tier.max_bytes

    def teardown(self) -> None:
        self.tier.close()
        os.close(self.fd)


LIMITS = [(IDENTITY, 6), (IDENTITY, 4), (OTHER_IDENTITY, 5)]
"""Identities and limits, in blocks, of the tiers that share a folder."""
tier_numbers = st.sampled_from(range(len(LIMITS)))


class DiskMachine(RuleBasedStateMachine):
    """Three tiers on one folder. `get` compares the content of each block that is loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.temporary = tempfile.TemporaryDirectory()
        fan_out = sorted({hash_of(number).hex()[:2] for number in NUMBERS})  # 256 folders would only take time
        self.patch = patch.object(disk, "FAN_OUT_FOLDERS", fan_out)
        self.patch.start()
        self.folder = Path(self.temporary.name) / "tier"
        self.tiers = [self.open(at) for at in range(len(LIMITS))]
        self.known: list[set[bytes]] = [set() for _ in LIMITS]

    def open(self, at: int) -> DiskTier:
        identity, num_blocks = LIMITS[at]
        tier = DiskTier(str(self.folder), num_blocks * DISK_RECORD_BYTES, identity, BLOCK_BYTES)
        tier.open()
        return tier

    def path_of(self, at: int, number: int) -> Path:
        name = hash_of(number).hex()
        return self.folder / "tandem-kv-1" / LIMITS[at][0].hex() / name[:2] / name

    def files_of(self, at: int) -> set[bytes]:
        """Returns the hashes that the files of a tier's identity are named after."""
        own = self.folder / "tandem-kv-1" / LIMITS[at][0].hex()
        return {bytes.fromhex(path.name) for path in files_below(own) if path.parent.name != "tmp"}

    @rule(at=tier_numbers, number=numbers)
    def store(self, at: int, number: int) -> None:
        put(self.tiers[at], number)
        assert held(self.tiers[at], number) == [number]

    @rule(at=tier_numbers, number=numbers)
    def load(self, at: int, number: int) -> None:
        before = self.files_of(at)
        num_corrupt = self.tiers[at].num_corrupt
        if not get(self.tiers[at], number):
            assert hash_of(number) not in before or self.tiers[at].num_corrupt == num_corrupt + 1
            assert hash_of(number) not in self.files_of(at)
            assert held(self.tiers[at], number) == []

    @rule(at=tier_numbers)
    def refresh(self, at: int) -> None:
        tier = self.tiers[at]
        tier.refresh()
        num_files = sum(len(self.files_of(other)) for other in (0, 2))  # of both identities
        assert tier.num_bytes == num_files * DISK_RECORD_BYTES <= tier.max_bytes
        assert {hash_of(number) for number in held(tier, *NUMBERS)} == self.files_of(at)

    @rule(at=tier_numbers)
    def clear(self, at: int) -> None:
        others = [other for other in range(len(LIMITS)) if LIMITS[other][0] != LIMITS[at][0]]
        before = [self.files_of(other) for other in others]
        self.tiers[at].clear()
        assert self.files_of(at) == set() and held(self.tiers[at], *NUMBERS) == []
        assert [self.files_of(other) for other in others] == before

    @rule(at=tier_numbers)
    def restart(self, at: int) -> None:
        self.tiers[at].close()
        self.tiers[at] = self.open(at)
        self.known[at] = set()
        assert {hash_of(number) for number in held(self.tiers[at], *NUMBERS)} == self.files_of(at)

    @rule(at=tier_numbers, number=numbers, num_bytes=st.integers(0, HEADER_BYTES + BLOCK_BYTES))
    def die_while_storing(self, at: int, number: int, num_bytes: int) -> None:
        """The worker is killed after it has written `num_bytes`, or before the rename."""

        class KilledFile(FileIO):
            def write(self, data: Any) -> int:
                nonlocal num_bytes
                super().write(data[:num_bytes])
                num_bytes -= len(data)
                if num_bytes < 0:
                    raise Killed
                return len(data)

        before = self.files_of(at)
        with patch.object(disk, "FileIO", KilledFile), patch.object(Path, "rename", side_effect=Killed):
            try:
                put(self.tiers[at], number)
            except Killed:
                assert self.files_of(at) <= before
            else:
                assert hash_of(number) in before
        self.restart(at)

    @rule(
        at=tier_numbers,
        number=numbers,
        place=st.integers(0, HEADER_BYTES + BLOCK_BYTES - 1),
        flipped=st.integers(0, 255),  # 0: the file is truncated instead
    )
    def damage(self, at: int, number: int, place: int, flipped: int) -> None:
        path = self.path_of(at, number)
        if not path.exists():
            return
        content = bytearray(path.read_bytes())
        if flipped:
            content[place] ^= flipped
            path.write_bytes(content)
        else:
            path.write_bytes(content[:place])
            assert not get(self.tiers[at], number) and not path.exists()

    @rule(number=numbers, at=tier_numbers)
    def vanish(self, number: int, at: int) -> None:
        self.path_of(at, number).unlink(missing_ok=True)

    @invariant()
    def changes_lead_to_what_is_held(self) -> None:
        for at, tier in enumerate(self.tiers):
            found = {hash_of(number) for number in held(tier, *NUMBERS)}
            changes = tier.changes.take()
            assert self.known[at].isdisjoint(changes.added) and self.known[at].issuperset(changes.removed)
            self.known[at] = (self.known[at] | set(changes.added)) - set(changes.removed)
            assert self.known[at] == found

    def teardown(self) -> None:
        self.patch.stop()
        self.temporary.cleanup()


TestHostMachine = HostMachine.TestCase
TestHostMachine.settings = settings(max_examples=150, stateful_step_count=40)
TestDiskMachine = DiskMachine.TestCase
TestDiskMachine.settings = settings(max_examples=40, stateful_step_count=25)
