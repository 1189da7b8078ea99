"""One sequence that decodes: the hashes of the blocks that it fills, and the limits of what it needs."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.decode_worker.sequence import DecodePrompt, DecodeSequence, num_blocks_needed
from tandem.protocol.messages.dispatch import PrepareDecode
from tandem.protocol.messages.media import MediaItem
from tandem.protocol.messages.packed import pack_token_ids
from tandem.protocol.messages.sampling import SamplingParams, StopConditions

BLOCK_SIZE = 4


def begun(prompt: list[int], num_generated: int = 0, **fields: Any) -> DecodeSequence:
    """Returns a sequence whose prompt has arrived, with token 100 as its first one."""
    request = PrepareDecode(
        "p", ["a"], "t", pack_token_ids(prompt), fields.pop("sampling", SamplingParams()), [0],
        fields.pop("stop", StopConditions(50)), 9.0, num_generated=num_generated, prefill_worker_id="x",
        prefill_epoch="x", **fields,
    )  # fmt: skip
    [sequence] = DecodePrompt.of(request, 0, 0.0, BLOCK_SIZE, "m").sequences.values()
    sequence.begin([7] * 50, 100, BLOCK_SIZE, position_offset=0)
    return sequence


@given(st.integers(1, 14), st.integers(0, 14), st.integers(0, 14))
def test_a_block_has_the_hash_by_which_the_next_turn_finds_it(num_tokens: int, start: int, length: int) -> None:
    """Also a block that begins with placeholders of an image at the end of the prompt."""
    spans = ((start, min(length, num_tokens - start)),)
    media = (MediaItem(b"d" * 32, "image", spans, "/dev/shm/x", ()),) if spans[0][1] > 0 else ()
    prompt = list(range(num_tokens))
    sequence = begun(prompt, media=media, cache_salt="a client")
    hashes = list(sequence.prompt.hashes)
    assert len(hashes) == num_tokens // BLOCK_SIZE
    for token_id in range(101, 121):
        if (block_hash := sequence.on_token(token_id, BLOCK_SIZE)) is not None:
            hashes.append(block_hash)
        computed = [*prompt, *sequence.output_token_ids[:-1]]
        assert len(hashes) == len(computed) // BLOCK_SIZE and sequence.num_tokens == len(computed) + 1
    assert hashes == sequence.prompt.hasher.prompt_hashes(pack_token_ids(computed))


@pytest.mark.parametrize("num_generated", [0, 3])
def test_a_step_has_the_newest_token_at_its_position(num_generated: int) -> None:
    """With a step in flight, whose token is not known yet, at the next one."""
    sequence = begun(list(range(9)), num_generated)
    assert sequence.output_token_ids == [*range(9 - num_generated, 9), 100]
    item = sequence.next_item(None)
    assert (list(item.token_ids), item.start) == ([100], 9)
    sequence.num_steps = 1
    ahead = sequence.next_item(3)
    assert (list(ahead.token_ids), ahead.start, ahead.follows) == ([0], 10, 3)
    sequence.num_steps = 0
    sequence.on_token(101, BLOCK_SIZE)
    item = sequence.next_item(None)
    assert (list(item.token_ids), item.start) == ([101], 10)


def test_stop_tokens_are_banned_until_min_tokens_also_ahead() -> None:
    sequence = begun([1, 2, 3], stop=StopConditions(50, frozenset({9}), min_tokens=3))
    bans = []
    for num_steps in range(4):
        sequence.num_steps = num_steps
        bans.append(set(sequence.next_item(None).samples[0].banned_token_ids))
    assert bans == [{9}, {9}, set(), set()], "the second and the third token are to come"


@pytest.mark.parametrize(("max_tokens", "num_more"), [(2, 1), (3, 2), (10, 9)])
def test_no_step_is_scheduled_ahead_behind_the_last_token(max_tokens: int, num_more: int) -> None:
    sequence = begun([1, 2, 3], stop=StopConditions(max_tokens))
    for num_steps in range(num_more):
        sequence.num_steps = num_steps
        assert sequence.has_more_steps
    sequence.num_steps = num_more
    assert not sequence.has_more_steps


@given(st.integers(1, 30), st.integers(0, 5), st.integers(1, 30), st.integers(1, 4))
def test_the_blocks_that_a_request_needs(num_tokens: int, num_generated: int, max_tokens: int, num: int) -> None:
    """Tokens that were generated before a migration are part of the prompt, and no longer to come."""
    request = PrepareDecode(
        "p", [f"a{i}" for i in range(num)], "t", pack_token_ids([1] * (num_tokens + num_generated)), SamplingParams(),
        [0] * num, StopConditions(max_tokens + num_generated), 9.0, num_generated=num_generated, prefill_worker_id="x",
        prefill_epoch="x",
    )  # fmt: skip
    num_prompt = num_tokens + num_generated
    to_end = -(-(num_prompt + max_tokens - 1) // BLOCK_SIZE)
    shared = num_prompt // BLOCK_SIZE
    to_begin = shared + num * (-(-(num_prompt + 1) // BLOCK_SIZE) - shared)
    assert num_blocks_needed(request, BLOCK_SIZE) == max(to_end, to_begin)
