"""Answers the same requests with other settings of the engine: `answer_checks.py MODEL SETTINGS FILE`.

SETTINGS: fields of `VllmEngineConfig` in JSON. Runs in vLLM's interpreter; `test_speculation.py` compares.
"""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import msgspec
from engine_driver import BLOCK_SIZE, EngineDriver  # type: ignore[import-not-found]

from tandem.protocol.messages.sampling import SamplingParams, StopConditions
from tandem.vllm_worker.vllm_host import kv_layout

PROMPT_LENGTHS = (3, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 150)
FEW = tuple(range(40, 44))
"""A model that may say only these repeats itself, so that drafts are often right."""
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "free": ({}, {}),
    "few": ({"allowed_token_ids": FEW}, {}),
    "one token at a time": ({"allowed_token_ids": FEW}, {"max_tokens": 1}),
    "stop": (
        {"allowed_token_ids": FEW, "presence_penalty": 0.3},
        {"stop_token_ids": frozenset({42}), "min_tokens": 19},
    ),
    "penalties": ({"allowed_token_ids": (*FEW, 44, 45), "frequency_penalty": 0.4, "repetition_penalty": 1.1}, {}),
    "bad words": ({"allowed_token_ids": FEW, "bad_words": ((41, 42), (43,), (40, 40, 40))}, {}),
    "logprobs": ({"allowed_token_ids": FEW, "logprobs": 3}, {}),
    "grammar": ({"grammar": 'start: %json {"type": "array", "items": {"enum": [1, 22]}, "minItems": 9}'}, {}),
}


def prompt(seed: int, num_tokens: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(4, 2000) for _ in range(num_tokens)]


def sampling(fields: dict[str, Any]) -> SamplingParams:
    return SamplingParams(temperature=0.0, **fields)


def answers(driver: EngineDriver) -> dict[str, Any]:
    """Returns what all cases give, four at a time."""
    added = {
        f"{name} after {num_tokens}": driver.add(
            prompt(num_tokens, num_tokens),
            sampling=sampling(fields),
            stop=StopConditions(**{"max_tokens": 43, **limits}),
            cache_salt=name,
        )
        for name, (fields, limits) in CASES.items()
        for num_tokens in PROMPT_LENGTHS
    }
    found = {}
    for name, engine_id in added.items():
        tokens = driver.result(engine_id)
        logprobs = [msgspec.to_builtins(each) for each in driver.logprobs[engine_id] if each is not None]
        found[name] = {"tokens": tokens, "ending": driver.endings[engine_id], "logprobs": logprobs}
    return found


def moved(driver: EngineDriver, wholes: dict[str, Any]) -> dict[str, list[int]]:
    """Returns the tokens of requests that go on with KV that another request computed, from the first token and later.

    wholes: tokens of each case without an interruption.
    """
    found = {}
    for name in ("free", "few", "penalties", "grammar"):
        fields, limits = CASES[name]
        for num_generated in (0, 20):
            generated, tokens = wholes[f"{name} after 150"]["tokens"][:num_generated], prompt(150, 150)
            stop = StopConditions(**{"max_tokens": 43, **limits})
            given = {"generated": generated, "sampling": sampling(fields)}
            one = StopConditions(num_generated + 1)
            source = driver.add(tokens, stop=one, ships=True, cache_salt=f"source {name} {num_generated}", **given)
            [first] = driver.result(source)
            salt = f"target {name} {num_generated}"
            target = driver.add(tokens, stop=stop, receives=True, cache_salt=salt, **given)
            driver.wait(lambda target=target: target in driver.allocated)
            num_blocks = -(-(len(tokens) + num_generated) // BLOCK_SIZE)
            computed = driver.computed[source]
            [(first_block, written)], [shipped] = driver.allocated[target].groups, computed
            assert not first_block and len(shipped) == len(written) == num_blocks, "no look-ahead is shipped"
            driver.copy_blocks(source, target)
            driver.engine.on_received(target, first)
            driver.engine.end_shipping(source)
            found[f"{name} after 150, {num_generated}"] = [*generated, first, *driver.result(target)]
    return found


def main() -> None:
    model, settings, answer_file = sys.argv[1:]
    driver = EngineDriver(model, **json.loads(settings))
    found: dict[str, Any] = {"answers": answers(driver)}
    found["moved"] = moved(driver, found["answers"])
    found["all_free"] = driver.all_free()
    found["figures"] = driver.figures._asdict()
    found["speculates"] = driver.engine.facts.speculates
    found["layout"] = msgspec.to_builtins(
        kv_layout(driver.config, driver.engine.vllm_config, driver.block_size, driver.rank_facts)
    )
    Path(answer_file).write_text(json.dumps(found))
    os._exit(0)  # vLLM's own end takes seconds


if __name__ == "__main__":
    main()
