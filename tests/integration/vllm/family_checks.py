"""Computes prompts of one model as a whole and with KV that moves: `python family_checks.py MODEL LENGTHS FILE`.

Runs in vLLM's interpreter, with one engine on both sides of the hand-over. LENGTHS: of prompts, by commas.
"""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from engine_driver import EngineDriver  # type: ignore[import-not-found]

from tandem.protocol.messages.sampling import StopConditions

NUM_TOKENS = 40
"""Of each answer: more than a block."""


def moved(driver: EngineDriver, tokens: list[int], cached: int, salt: str) -> dict[str, Any]:
    """Computes a prompt as one request and goes on as another one. cached: tokens that the other one has before."""
    source = driver.add(tokens, stop=StopConditions(1), ships=True, cache_salt=f"source {salt}")
    [first] = driver.result(source)
    if cached:
        driver.run(tokens[:cached], stop=StopConditions(1), cache_salt=f"target {salt}")
    target = driver.add(tokens, stop=StopConditions(NUM_TOKENS), receives=True, cache_salt=f"target {salt}")
    driver.wait(lambda: target in driver.allocated)
    blocks = driver.allocated[target]
    driver.copy_blocks(source, target)
    driver.engine.on_received(target, first)
    driver.engine.end_shipping(source)
    found = [first, *driver.result(target)]
    return {"tokens": found, "num_cached": blocks.num_cached_tokens, "groups": blocks.groups}


def main() -> None:
    model, lengths, file = sys.argv[1:]
    draw = random.Random(7)
    cases, driver = [], EngineDriver(model, kv_cache_bytes=256 << 20, max_model_len=1024)
    for length in map(int, lengths.split(",")):
        tokens = [draw.randrange(3, 2000) for _ in range(length)]
        whole = driver.run(tokens, stop=StopConditions(NUM_TOKENS), cache_salt=f"whole {length}")
        again = driver.run(tokens, stop=StopConditions(NUM_TOKENS), cache_salt=f"whole {length}")
        parts = {
            str(cached): moved(driver, tokens, cached, f"{length} {cached}")
            for cached in (0, length // 2, length - 1)
            if cached < length
        }
        cases.append({"length": length, "whole": whole, "after a hit": again, "moved": parts})
        assert driver.all_free(), "blocks are lost"
    facts = driver.rank_facts
    Path(file).write_text(
        json.dumps(
            {"groups": facts.groups, "immovable": facts.immovable, "block_size": driver.block_size, "cases": cases}
        )
    )
    os._exit(0)  # vLLM's own end takes seconds


if __name__ == "__main__":
    main()
