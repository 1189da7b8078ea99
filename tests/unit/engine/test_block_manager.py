"""Random orders of allocation, release and quarantine: each block has one owner, which alone frees it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.engine.kv_cache.block_manager import BlockManager, OutOfBlocks


@given(st.lists(st.tuples(st.sampled_from(["allocate", "release", "quarantine", "end"]), st.integers(0, 9))))
def test_every_block_has_one_owner(events: list[tuple[str, int]]) -> None:
    blocks = BlockManager(20, 16)
    held: list[list[int]] = []
    quarantined: list[list[int]] = []
    for event, number in events:
        if event == "allocate":
            if blocks.can_allocate(number):
                held.append(blocks.allocate(number))
                assert held[-1] == sorted(held[-1])
            else:
                with pytest.raises(OutOfBlocks):
                    blocks.allocate(number)
        elif event == "release" and held:
            blocks.release(held.pop(number % len(held)))
        elif event == "quarantine" and held:
            quarantined.append(held.pop(number % len(held)))
            blocks.quarantine(quarantined[-1])
        elif event == "end" and quarantined:
            blocks.end_quarantine(quarantined.pop(number % len(quarantined)))
        blocks.check()
        assert blocks.num_free == 20 - sum(map(len, held)) - sum(map(len, quarantined))
        assert blocks.num_quarantined == sum(map(len, quarantined))
    everything = [block_id for group in held + quarantined for block_id in group]
    assert len(everything) == len(set(everything))


def test_a_block_cannot_be_freed_twice_or_by_another_owner() -> None:
    blocks = BlockManager(4, 16)
    ids = blocks.allocate(2)
    blocks.quarantine(ids)
    with pytest.raises(AssertionError):
        blocks.release(ids)
    blocks.end_quarantine(ids)
    with pytest.raises(AssertionError):
        blocks.end_quarantine(ids)


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (16, 1), (17, 2), (32, 2), (33, 3)])
def test_blocks_for_tokens(num_tokens: int, num_blocks: int) -> None:
    assert BlockManager(4, 16).num_blocks_for(num_tokens) == num_blocks
