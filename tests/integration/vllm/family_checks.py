"""Computes prompts of one model as a whole and with KV that moves: `family_checks.py MODEL SETTINGS LENGTHS FILE`.

Runs in vLLM's interpreter, with one engine on both sides of the hand-over. SETTINGS: of the engine, as JSON. LENGTHS:
of prompts, as JSON.
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


def alone_and_moved(driver: EngineDriver, tokens: list[int], num_before: int) -> dict[str, Any]:
    """Returns the answer to a prompt of one request, and that of a request which goes on with another one's KV.

    num_before: tokens of the prompt that were computed before where the answer is decoded.
    """
    salt, stop = f"{len(tokens)} {num_before}", StopConditions(NUM_TOKENS)
    if num_before:
        for where in ("alone", "target"):
            driver.run(tokens[:num_before], stop=StopConditions(1), cache_salt=f"{where} {salt}")
    alone = driver.run(tokens, stop=stop, cache_salt=f"alone {salt}")
    source = driver.add(tokens, stop=StopConditions(1), ships=True, cache_salt=f"source {salt}")
    [first] = driver.result(source)
    target = driver.add(tokens, stop=stop, receives=True, cache_salt=f"target {salt}")
    driver.wait(lambda: target in driver.allocated)
    blocks = driver.allocated[target]
    driver.copy_blocks(source, target)
    driver.engine.on_received(target, first)
    driver.engine.end_shipping(source)
    found = [first, *driver.result(target)]
    return {"alone": alone, "moved": found, "num_cached": blocks.num_cached_tokens, "groups": blocks.groups}


def main() -> None:
    model, settings, lengths, file = sys.argv[1:]
    draw, cases = random.Random(7), []
    driver = EngineDriver(model, **json.loads(settings))
    for length in json.loads(lengths):
        tokens = [draw.randrange(3, 2000) for _ in range(length)]
        for num_before in (0, length // 2, length - 1):
            cases.append({"length": length, "num_before": num_before, **alone_and_moved(driver, tokens, num_before)})
    facts = driver.rank_facts
    found = {"groups": facts.groups, "immovable": facts.immovable, "all_free": driver.all_free(), "cases": cases}
    Path(file).write_text(json.dumps(found))
    os._exit(0)  # vLLM's own end takes seconds


if __name__ == "__main__":
    main()
