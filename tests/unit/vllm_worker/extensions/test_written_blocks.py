"""What decode asks for is what its layers need and do not have, and prefill has all of it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tandem.handover.outgoing import NO_BLOCK, LeavingBlocks
from tandem.protocol.messages.transfer import KVReserved, ReservedBlocks
from tandem.vllm_worker.extensions.kv_memory import written_blocks


def table(first_id: int, num_tokens: int, block_size: int, reach: int) -> list[int]:
    """Returns the blocks that vLLM keeps for a prompt in one group. reach: tokens before the next one that it needs."""
    num_blocks, num_gone = -(-num_tokens // block_size), max(0, num_tokens - reach + 1) // block_size
    return [NO_BLOCK if number < num_gone else first_id + number for number in range(num_blocks)]


@given(data=st.data())
def test_a_group_gets_what_it_needs(data: st.DataObject) -> None:
    block_size = data.draw(st.sampled_from([1, 2, 4, 7]))
    num_tokens = data.draw(st.integers(1, 60))
    num_cached = data.draw(st.integers(0, (num_tokens - 1) // block_size)) * block_size
    reach = data.draw(st.sampled_from([2, 3, 8, 16, 1000]))  # 2: a state; 1,000: full attention
    target, source = (table(each, num_tokens, block_size, reach) for each in (1000, 2000))
    first, written = written_blocks(target, block_size, num_cached, num_tokens)
    assert NO_BLOCK not in written
    assert target[first:] == written, "from the first one on"
    needed = [number for number, each in enumerate(target) if each != NO_BLOCK and number >= num_cached // block_size]
    assert needed == [*range(first, len(target))], "all that is needed, and nothing else"

    leaving = LeavingBlocks(len(source))
    shipped: list[tuple[int, int]] = []
    reserved_after = data.draw(st.integers(0, num_tokens))
    for num_computed in sorted({*data.draw(st.lists(st.integers(1, num_tokens), max_size=4)), num_tokens}):
        is_whole = num_computed == num_tokens
        num_complete = len(source) if is_whole else num_computed // block_size
        leaving.src_block_ids = table(2000, num_computed, block_size, reach)[:num_complete]
        if leaving.dst_block_ids is None and (is_whole or num_computed >= reserved_after):
            reserved = KVReserved("t", [ReservedBlocks(first, written)])
            [group] = reserved.groups
            leaving.dst_block_ids, leaving.first_block, leaving.num_shipped = (
                group.block_ids, group.first_block, group.first_block,
            )  # fmt: skip
        if (ship := leaving.next_ship("pair", "t", 0)) is not None:
            assert ship.first_block + len(ship.src_block_ids) == num_complete
            shipped += zip(ship.src_block_ids, ship.dst_block_ids, strict=True)
    assert shipped == [(2000 + number, 1000 + number) for number in needed], "each block, once, to its own place"
