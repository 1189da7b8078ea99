"""What a worker stores in tiers and loads from them: by scripts, and in random orders of events."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tandem.decode_worker.decode_scheduler import Action
from tandem.engine.kv_cache.block_manager import BlockManager
from tandem.engine.kv_cache.prefix_tiers import (
    BATCH_BYTES,
    MAX_TO_STORE_BYTES,
    FindBlocks,
    LoadBlocks,
    PrefixTiers,
    StoreBlocks,
    TierState,
)
from tests.support.scripts import Play, Words, check, listed

SCRIPTS = Path(__file__).parent / "scripts"
BLOCK_SIZE = 4


def hashes_of(prompt: str, num_blocks: int) -> list[bytes]:
    return [f"{prompt}{number}".ljust(16).encode() for number in range(num_blocks)]


class Worker:
    """A block manager with tiers, and the actions that nobody has carried out yet."""

    def __init__(
        self, num_blocks: int = 16, tiers: tuple[str, ...] = ("host",), block_bytes: int = 1, speed: float = 0.0
    ) -> None:
        self.blocks = BlockManager(num_blocks, BLOCK_SIZE)
        states = [TierState(name, knows_all=name != "store") for name in tiers]
        self.tiers = PrefixTiers(self.blocks, states, block_bytes, lambda: speed)
        self.now = 0.0
        self.pending: list[Action] = []

    def step(self) -> list[Action]:
        self.pending += self.tiers.take_actions(self.now)
        return self.pending

    def compute(self, hashes: list[bytes]) -> None:
        """Computes a prompt's full blocks and ends it."""
        cached = self.blocks.match(hashes)
        self.blocks.share(cached)
        block_ids = cached + self.blocks.allocate(len(hashes) - len(cached))
        for block_id, block_hash in zip(block_ids, hashes, strict=True):
            self.blocks.publish(block_id, block_hash)
        self.blocks.release(block_ids)

    def must_wait(self, key: str, hashes: list[bytes]) -> bool:
        waits = self.tiers.must_wait(self.now, key, hashes)
        self.step()
        return waits


class ScriptedTiers:
    """Plays a script (`tests.support.scripts`). After each event, new orders to the tiers are shown.

    `t=5` sets the time, which then stays. `a:3` are the blocks a0 to a2 of prompt a, `a1:3` are a1 and a2, and
    `a:2+b:1` those of a prompt that begins as a. Blocks have 4 tokens. The tier `store` must be asked for what it has.

        worker [tiers=host,disk] [blocks=16] [backlog=N] [block_bytes=1] [speed=0]
                              begins with another worker; backlog: blocks that may wait to be stored; speed: prompt
                              tokens that it computes in a second
        compute BLOCKS        a prompt, which ends
        wait NAME BLOCKS      asks whether a prompt of that name must wait
        has TIER BLOCKS, lacks TIER BLOCKS
        stored TIER [failed], loaded TIER [COUNT], found TIER [failed]
                              the answer to its first order
        tick, find BLOCKS (the blocks of the pool that hold them), news (to proxies), state
    """

    def __init__(self) -> None:
        self._worker = Worker()

    def play(self, event: str) -> list[str]:
        words = Words(event)
        self._worker.now = float(words.options.pop("t", self._worker.now))
        failed = words.flag("failed")
        lines = self._play(words, "it is broken" if failed else None)
        known = len(self._worker.pending)
        orders = self._worker.step()[known:]
        self._worker.blocks.check()
        return lines + [shown(action) for action in orders]

    def _play(self, words: Words, error: str | None) -> list[str]:
        worker, tiers = self._worker, self._worker.tiers
        match words.words:
            case ["worker"]:
                self._begin(**words.options)
            case "compute", blocks:
                worker.compute(named(blocks))
            case "wait", name, blocks:
                waits = tiers.must_wait(worker.now, name, named(blocks))
                return [f"{name} {'waits' if waits else 'does not wait'}"]
            case "has", tier, blocks:
                tiers.on_changes(tier, named(blocks), [])
            case "lacks", tier, blocks:
                tiers.on_changes(tier, [], named(blocks))
            case "stored", tier:
                action = self._first(tier, StoreBlocks)
                if error is None:
                    tiers.on_changes(tier, action.hashes, [])
                tiers.on_stored(worker.now, tier, 0 if error else len(action.hashes), error)
            case "loaded", tier, *count:
                load = self._first(tier, LoadBlocks)
                tiers.on_loaded(worker.now, tier, load.load_id, int(count[0]) if count else len(load.hashes), error)
            case "found", tier:
                tiers.on_found(worker.now, self._first(tier, FindBlocks).load_id, error)
            case ["tick"]:
                tiers.on_tick(worker.now)
            case "find", blocks:
                return [f"in blocks {listed(worker.blocks.match(named(blocks)))}"]
            case ["news"]:
                update = tiers.prefix_log.take()
                return [f"added {names(update.added, 8)}; evicted {names(update.evicted, 8)}"]
            case ["state"]:
                return self._state()
            case _:
                raise AssertionError(words.words)
        return []

    def _begin(
        self, tiers: str = "host", blocks: str = "16", backlog: str = "", block_bytes: str = "1", speed: str = "0"
    ) -> None:
        names = tuple(tiers.split(",")) if tiers else ()
        num_bytes = MAX_TO_STORE_BYTES // int(backlog) if backlog else int(block_bytes)
        self._worker = Worker(int(blocks), names, num_bytes, float(speed))

    def _first(self, tier: str, kind: type[Order]) -> Order:
        action = next(each for each in self._worker.pending if isinstance(each, kind) and each.tier == tier)
        self._worker.pending.remove(action)
        return action

    def _state(self) -> list[str]:
        tiers = self._worker.tiers
        idle = ", idle" if tiers.is_idle else ""
        speed = f", {tiers.loaded_tokens_per_s:.0f} tokens a second" if tiers.loaded_tokens_per_s else ""
        lines = [f"{self._worker.blocks.num_free} blocks free, {tiers.num_loaded_tokens} tokens loaded{speed}{idle}"]
        for each in tiers.figures():
            error = f", {each.error}" if each.error else ""
            lines.append(
                f"{each.name}: {each.num_blocks} blocks, {each.num_stored} stored, {each.num_skipped} skipped{error}"
            )
        return lines


Order = TypeVar("Order", StoreBlocks, LoadBlocks, FindBlocks)


def named(text: str) -> list[bytes]:
    """Returns the hashes of "a:2+b1:3"."""
    found: list[bytes] = []
    for prompt, first, end in re.findall(r"([a-z])(\d*):(\d+)", text):
        found += hashes_of(prompt, int(end))[int(first or 0) :]
    return found


def names(hashes: bytes, size: int) -> str:
    """Returns the names of concatenated hashes of that many bytes."""
    return listed(hashes[start : start + size].decode().strip() for start in range(0, len(hashes), size))


def shown(action: Action) -> str:
    match action:
        case StoreBlocks(tier, block_ids, hashes):
            return f"{tier}: store {names(b''.join(hashes), 16)} from {listed(block_ids)}"
        case LoadBlocks(tier, _, block_ids, hashes):
            return f"{tier}: load {names(b''.join(hashes), 16)} into {listed(block_ids)}"
        case FindBlocks(tier, _, hashes):
            return f"{tier}: find {names(b''.join(hashes), 16)}"
    raise AssertionError(action)


def machine_of(file: Path) -> Play:
    return ScriptedTiers().play


@pytest.mark.parametrize("file", sorted(SCRIPTS.glob("*.txt")), ids=lambda file: file.stem)
def test_scripts(file: Path) -> None:
    check(file, machine_of(file))


class RandomOrders(RuleBasedStateMachine):
    """Prompts, evictions, answers, failures and time in any order. Contents are the hashes that were written."""

    def __init__(self) -> None:
        super().__init__()
        self.worker = Worker(num_blocks=12, tiers=("host", "disk", "store"), block_bytes=BATCH_BYTES // 3, speed=100.0)
        self.content: dict[int, bytes] = {}
        self.held: list[list[int]] = []
        self.stored: dict[str, set[bytes]] = {"host": set(), "disk": set(), "store": set()}
        self.num_prompts = 0

    def prompt(self, family: int, length: int) -> list[bytes]:
        return hashes_of(f"p{family}.", length)

    @rule(family=st.integers(0, 3), length=st.integers(1, 6), keep=st.booleans())
    def prompt_arrives(self, family: int, length: int, keep: bool) -> None:
        worker, hashes = self.worker, self.prompt(family, length)
        key, self.num_prompts = f"x{self.num_prompts}", self.num_prompts + 1
        if length > worker.blocks.num_free or worker.must_wait(key, hashes):
            return
        worker.tiers.forget(key)
        cached = worker.blocks.match(hashes)
        if length - len(cached) > worker.blocks.num_free_without(cached):
            return
        for block_id, block_hash in zip(cached, hashes, strict=False):
            assert self.content[block_id] == block_hash, "the prefix cache holds what its hash says"
        worker.blocks.share(cached)
        block_ids = cached + worker.blocks.allocate(length - len(cached))
        for block_id, block_hash in zip(block_ids, hashes, strict=True):
            self.content[block_id] = block_hash
            worker.blocks.publish(block_id, block_hash)
        if keep:
            self.held.append(block_ids)
        else:
            worker.blocks.release(block_ids)

    @precondition(lambda self: self.held)
    @rule()
    def prompt_ends(self) -> None:
        self.worker.blocks.release(self.held.pop())

    @rule()
    def event(self) -> None:
        self.worker.step()

    @precondition(lambda self: self.worker.pending)
    @rule(number=st.integers(0, 9), fails=st.booleans(), share=st.floats(0, 1))
    def tier_answers(self, number: int, fails: bool, share: float) -> None:
        worker = self.worker
        first_of_tier = {each.tier: each for each in reversed(worker.pending)}
        action = list(first_of_tier.values())[number % len(first_of_tier)]
        worker.pending.remove(action)
        error = "broken" if fails else None
        there = self.stored[action.tier]
        match action:
            case StoreBlocks():
                count = int(share * len(action.hashes)) if fails else len(action.hashes)
                for block_id, block_hash in zip(action.block_ids, action.hashes, strict=True):
                    assert self.content[block_id] == block_hash, "a block stays as it is while it is stored"
                there.update(action.hashes[:count])
                worker.tiers.on_changes(action.tier, action.hashes[:count], [])
                worker.tiers.on_stored(worker.now, action.tier, count, error)
            case LoadBlocks():
                count = int(share * len(action.hashes)) if fails else len(action.hashes)
                while not set(action.hashes[:count]) <= there:
                    count -= 1
                for block_id in action.block_ids:
                    self.content[block_id] = b"undefined"
                for block_id, block_hash in zip(action.block_ids[:count], action.hashes, strict=False):
                    self.content[block_id] = block_hash
                worker.tiers.on_loaded(worker.now, action.tier, action.load_id, count, error)
            case FindBlocks():
                worker.tiers.on_changes(action.tier, [each for each in action.hashes if each in there], [])
                worker.tiers.on_found(worker.now, action.load_id, error)

    @rule(tier=st.sampled_from(["host", "disk", "store"]), silently=st.booleans())
    def tier_loses_blocks(self, tier: str, silently: bool) -> None:
        lost = [each for number, each in enumerate(sorted(self.stored[tier])) if number % 2]
        self.stored[tier].difference_update(lost)
        if not silently:
            self.worker.tiers.on_changes(tier, [], lost)

    @rule(seconds=st.sampled_from([0.01, 1.0, 6.0, 40.0]))
    def time_passes(self, seconds: float) -> None:
        self.worker.now += seconds
        self.worker.tiers.on_tick(self.worker.now)

    @rule()
    def cache_is_cleared(self) -> None:
        self.worker.blocks.drop_cached()

    @invariant()
    def blocks_have_owners(self) -> None:
        self.worker.blocks.check()

    def teardown(self) -> None:
        """All answers arrive; then nothing is held and nothing is asked any more."""
        worker = self.worker
        while self.held:
            worker.blocks.release(self.held.pop())
        for _ in range(100):
            worker.now += 100
            worker.step()
            if not worker.pending:
                break
            while worker.pending:
                self.tier_answers(0, False, 1.0)
        assert worker.tiers.is_idle and worker.blocks.num_free == 12


TestRandomOrders = RandomOrders.TestCase
TestRandomOrders.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
