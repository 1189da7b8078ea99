"""Does with vLLM's engine what Tandem relies on: `python engine_checks.py MODEL [PART ...] FILE` writes what happened.

Does all parts unless some are named. Runs in vLLM's interpreter; `test_conformance.py` says what must be in the file.
"""

from __future__ import annotations

import copy
import importlib.metadata
import json
import os
import random
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import msgspec
from engine_driver import BLOCK_SIZE, EngineDriver  # type: ignore[import-not-found]

from tandem.protocol.messages.sampling import SamplingParams, StopConditions, Thinking
from tandem.vllm_worker.engine import held_requests, step_shares
from tandem.vllm_worker.extensions import worker_extension
from tandem.vllm_worker.vllm_host import kv_layout

NUM_TOKENS = 40
SPLITS = (1, 13, 31)
PROMPT_LENGTHS = (20, 150)
"""In one chunk, and in three."""
ARRAY = 'start: %json {"type": "array", "items": {"type": "integer"}, "minItems": 30}'
SLOW = "start: " + "a? " * 20_000 + '\na: "a"'
"""Its first mask takes seconds."""
_SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "greedy": ({"temperature": 0.0}, {}),
    "seeded": ({}, {}),
    "top-k and top-p": ({"temperature": 0.9, "top_p": 0.9, "top_k": 50}, {}),
    "min-p": ({"temperature": 1.5, "min_p": 0.02}, {}),
    "penalties": (
        {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2, "temperature": 0.8},
        {},
    ),
    "greedy with penalties": ({"frequency_penalty": 2.0, "temperature": 0.0}, {}),
    "min_tokens": (
        {"allowed_token_ids": tuple(range(40, 50))},
        {"stop_token_ids": frozenset({41, 42}), "min_tokens": 35},
    ),
    "bad words": (
        {"allowed_token_ids": tuple(range(40, 46)), "bad_words": ((41, 42), (43,), (44, 45, 40))},
        {},
    ),
    "logit bias": ({"logit_bias": ((50, 6.0), (51, 6.0))}, {}),
    "grammar": ({"grammar": ARRAY}, {}),
    "greedy with a grammar": ({"grammar": ARRAY, "temperature": 0.0}, {}),
    "thinking budget": ({"thinking": Thinking(True, (41,), (42, 43), (42, 43, 44), 12)}, {}),
    "greedy with a thinking budget": ({"thinking": Thinking(True, (41,), (42,), (42,), 30), "temperature": 0.0}, {}),
    "thinking budget and grammar": (
        {"grammar": ARRAY, "thinking": Thinking(False, (41,), (42,), (42,), 5), "logit_bias": ((41, 100.0),)},
        {},
    ),
}
"""Of the sampling, and of the end."""
CASES = {
    name: (SamplingParams(**{"seed": 7, **sampling}), StopConditions(NUM_TOKENS, **stop))
    for name, (sampling, stop) in _SETTINGS.items()
}


def prompt(seed: int, num_tokens: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3, 2000) for _ in range(num_tokens)]


def resumed(driver: EngineDriver) -> list[dict[str, Any]]:
    """Computes each case as a whole, and then goes on after some of its tokens, in a batch."""
    found = []
    for number, (name, (sampling, stop)) in enumerate(CASES.items()):
        for length in PROMPT_LENGTHS:
            tokens = prompt(number, length)
            whole = driver.run(tokens, sampling=sampling, stop=stop)
            splits = [split for split in SPLITS if split < len(whole)]
            ids = [driver.add(tokens, generated=whole[:split], sampling=sampling, stop=stop) for split in splits]
            parts = {split: whole[:split] + driver.result(each) for split, each in zip(splits, ids, strict=True)}
            found.append({"case": name, "num_prompt_tokens": length, "whole": whole, "resumed": parts})
    return found


def memory(driver: EngineDriver) -> dict[str, Any]:
    """Compares the file that peers map with the tensor of all blocks."""
    driver.run(prompt(1, 200))
    rows = driver.rows
    mapped = Path(rows.untyped_storage().filename).read_bytes()
    [*_, num_layers, _] = rows.shape
    is_same = all(
        mapped[place : place + rows.shape[2]] == rows[block, layer].numpy().tobytes()
        for block in range(rows.shape[0])
        for layer in range(num_layers)
        for place in [rows.storage_offset() + block * rows.stride(0) + layer * rows.stride(1)]
    )
    target = str(Path(rows.untyped_storage().filename).readlink())
    return {
        "file": target,
        "shape": list(rows.shape),
        "num_blocks": driver.engine.facts.num_blocks,
        "is_same": is_same,
        "is_written": bool(rows.any()),
    }


def layouts(driver: EngineDriver) -> list[dict[str, Any]]:
    """Returns what pairs compare: as it is, with another arrangement of a block, and with two ranks."""
    engine, found = driver.engine, []
    own = engine.vllm_config.cache_config.kv_cache_layout
    for name, num_ranks in ((own, 1), ("LBNHC", 1), (own, 2)):
        config = copy.copy(engine.vllm_config)
        config.parallel_config = copy.copy(config.parallel_config)
        config.parallel_config.tensor_parallel_size = num_ranks
        config.cache_config = copy.copy(config.cache_config)
        config.cache_config.kv_cache_layout = name
        found.append(msgspec.to_builtins(kv_layout(driver.config, config, driver.block_size, driver.rank_facts)))
    return found


def prefixes(driver: EngineDriver) -> dict[str, Any]:
    """Returns the hashes that a request added, those expected, and what others and a reset evict."""
    driver.engine.clear_cache()
    driver.added.clear()
    tokens = prompt(102, 100)  # of no earlier request: blocks that are cleared and computed again are not reported
    generated = driver.run(tokens)
    expected = driver.hashes((tokens + generated)[:-1])
    driver.wait(lambda: set(expected) <= set(driver.added))
    added = list(driver.added)
    driver.added.clear()
    salted = driver.run(tokens, cache_salt="salt")
    salted_hashes = driver.hashes((tokens + salted)[:-1], "salt")
    driver.wait(lambda: set(salted_hashes) <= set(driver.added))
    added_salted = list(driver.added)
    driver.evicted.clear()
    for number in range(6):  # more than the cache holds
        driver.run(prompt(10 + number, 460))
    driver.wait(lambda: set(expected) <= set(driver.evicted))
    evicted = list(driver.evicted)
    driver.evicted.clear()
    last = driver.hashes(prompt(15, 460))
    driver.engine.clear_cache()
    driver.wait(lambda: set(last) <= set(driver.evicted))
    as_text: dict[str, list[bytes]] = {
        "expected": expected,
        "added": added,
        "expected_salted": salted_hashes,
        "added_salted": added_salted,
        "evicted": evicted,
        "last": last,
        "reset": list(driver.evicted),
    }
    return {name: [each.hex() for each in hashes] for name, hashes in as_text.items()}


def moved(driver: EngineDriver) -> dict[str, Any]:
    """Copies the blocks of one request to another one, as a shipment does; the first two are cached there.

    Without generated tokens, and with so many that they need a block more than the prompt.
    """
    found: dict[str, Any] = {}
    for name, (sampling, stop) in CASES.items():
        tokens = prompt(99, 150)
        whole = driver.run(tokens, sampling=sampling, stop=stop, cache_salt=name)
        for num_generated in (0, 20):
            generated = whole[:num_generated]
            driver.engine.clear_cache()
            one = StopConditions(num_generated + 1, stop.stop_token_ids, stop.min_tokens)
            given: dict[str, Any] = {"generated": generated, "sampling": sampling}
            source = driver.add(tokens, stop=one, ships=True, cache_salt="source", **given)
            [first] = driver.result(source)
            driver.run(tokens[:70], stop=StopConditions(1), cache_salt="target")
            target = driver.add(tokens, stop=stop, receives=True, cache_salt="target", **given)
            driver.wait(lambda target=target: target in driver.allocated)
            blocks = driver.allocated[target]
            [(num_cached, written)] = blocks.groups
            driver.copy_blocks(source, target)
            driver.engine.on_received(target, first)
            driver.engine.end_shipping(source)
            found[f"{name} after {num_generated}"] = {
                "whole": whole,
                "moved": [*generated, first, *driver.result(target)],
                "num_cached": num_cached,
                "num_blocks": num_cached + len(written),
                "all_free": driver.all_free(),
            }
    return found


def aborts(driver: EngineDriver) -> dict[str, dict[str, bool]]:
    """Aborts a request in each phase. Returns whether blocks were kept while a peer may use them, and free at last."""
    engine, found = driver.engine, {}
    long = StopConditions(300)

    def note(phase: str, **facts: bool) -> None:
        found[phase] = {**facts, "all_free": driver.all_free()}

    def are_kept() -> bool:
        """Returns whether blocks are still taken after other work."""
        driver.run(prompt(5, 40), stop=StopConditions(3))
        return driver.figures.num_free_blocks < driver.figures.num_blocks

    running = [driver.add(prompt(20 + number, 40), stop=long) for number in range(4)]
    driver.wait(lambda: all(driver.outputs[each] for each in running))
    waiting = driver.add(prompt(30, 40), stop=long)
    engine.abort([waiting])
    engine.abort(running[:3])
    driver.run(prompt(31, 40), stop=StopConditions(3))
    has_begun = waiting in driver.begun
    engine.abort(running[3:])
    note("waiting", did_not_begin=not has_begun)

    computing = driver.add(prompt(32, 480), stop=StopConditions(3))
    driver.wait(lambda: computing in driver.begun)
    engine.abort([computing])
    note("computing", has_no_token=not driver.outputs[computing])

    grammar = driver.add(prompt(33, 40), generated=[1], sampling=SamplingParams(grammar=ARRAY))
    engine.abort([grammar])
    note("waiting for its grammar", has_no_token=not driver.outputs[grammar])

    decoding = driver.add(prompt(34, 100), stop=long)
    driver.wait(lambda: len(driver.outputs[decoding]) > 5)
    engine.abort([decoding])
    note("decoding")

    receiving = driver.add(prompt(35, 100), receives=True)
    driver.wait(lambda: receiving in driver.allocated)
    engine.abort([receiving])
    kept = are_kept()
    engine.end_receiving(receiving)
    note("receiving", were_kept=kept)

    received = driver.add(prompt(36, 100), receives=True)
    driver.wait(lambda: received in driver.allocated)
    engine.on_received(received, 7)
    engine.abort([received])
    note("received")

    received = driver.add(prompt(36, 100), receives=True, stop=long)
    driver.wait(lambda: received in driver.allocated)
    engine.on_received(received, 7)
    driver.wait(lambda: len(driver.outputs[received]) > 3)
    engine.abort([received])
    note("decoding what was received")

    shipping = driver.add(prompt(37, 480), ships=True)
    driver.wait(lambda: shipping in driver.computed)
    engine.abort([shipping])
    kept = are_kept()
    engine.end_shipping(shipping)
    note("shipping while computed", were_kept=kept)

    shipping = driver.add(prompt(38, 100), ships=True, stop=StopConditions(1))
    driver.result(shipping)
    kept = are_kept()
    engine.end_shipping(shipping)
    note("shipping when computed", were_kept=kept)

    shipping = driver.add(prompt(39, 100), ships=True, stop=long)
    driver.wait(lambda: len(driver.outputs[shipping]) > 3)
    engine.end_shipping(shipping)
    engine.abort([shipping])
    note("decoding what was shipped")

    # All blocks are reserved, so that the last one has to wait.
    reserving = [driver.add(prompt(40 + number, 480), receives=True) for number in range(5)]
    driver.wait(lambda: sum(each in driver.allocated for each in reserving) >= 3)
    driver.wait_for_steps()
    late = [each for each in reserving if each not in driver.allocated]
    engine.abort(reserving)
    for each in reserving:
        if each in driver.allocated:
            engine.end_receiving(each)
    note("waiting for blocks to receive in", had_to_wait=bool(late))
    return found


def pauses(driver: EngineDriver) -> dict[str, Any]:
    """Returns how many reports come in a second in which a request waits for KV, and how soon it goes on then."""
    waiting = driver.add(prompt(70, 100), receives=True, stop=StopConditions(3))
    driver.wait(lambda: waiting in driver.allocated)
    before = driver.num_reports
    time.sleep(1.0)
    num_reports = driver.num_reports - before
    driver.engine.on_received(waiting, 7)
    tokens = driver.result(waiting)
    return {"num_reports": num_reports, "num_tokens": len(tokens), "all_free": driver.all_free()}


def grammars(driver: EngineDriver) -> dict[str, dict[str, Any]]:
    """Returns the tokens and the endings of requests whose grammars follow thinking, or are optional.

    The model's tokens are random, so one after the other soon ends the thinking.
    """
    stop = StopConditions(60, frozenset({2}))
    thinking = Thinking(True, (41,), (42,), (42,))
    answer = 'start: "abc"'
    only = tuple(range(40, 50))
    late = StopConditions(60, frozenset({2}), min_tokens=30)
    cases: dict[str, tuple[SamplingParams, list[int]]] = {
        "before min_tokens": (SamplingParams(grammar=answer), []),
        "answer": (SamplingParams(grammar=answer), []),
        "after thinking": (SamplingParams(grammar=answer, thinking=thinking), [45, 46, 42]),
        "while it thinks": (SamplingParams(grammar=answer, thinking=thinking, allowed_token_ids=only), [45, 46]),
        "without thinking": (
            SamplingParams(grammar=answer, thinking=Thinking(False, (41,), (42,), (42,)), logit_bias=((41, -100.0),)),
            [],
        ),
        "optional and invalid": (SamplingParams(grammar="start: ((", is_grammar_optional=True), []),
        "optional, not followed": (SamplingParams(grammar=ARRAY, is_grammar_optional=True), [5]),
        "optional, before min_tokens": (SamplingParams(grammar="start: ((", is_grammar_optional=True), []),
        "optional and slow": (SamplingParams(grammar=SLOW, is_grammar_optional=True), []),
    }
    found = {}
    for name, (sampling, generated) in cases.items():
        ends = late if "before min_tokens" in name else stop
        added = driver.add(prompt(80, 40), generated=generated, sampling=sampling, stop=ends)
        found[name] = {"tokens": driver.result(added), "ending": driver.endings[added]}
    return found


def logprobs(driver: EngineDriver) -> dict[str, dict[str, Any]]:
    """Returns what is reported for requests with other logprobs, alone and in the same steps: [logprob, rank, top]."""
    cases = {
        "none": SamplingParams(temperature=0.0),
        "three likeliest": SamplingParams(temperature=0.0, logprobs=3),
        "one named": SamplingParams(temperature=0.0, logprobs=2, logprob_token_ids=(9,)),
        "five named": SamplingParams(temperature=0.0, logprobs=6, logprob_token_ids=(5, 9, 4, 77, 3)),
    }

    def reported(engine_id: str, params: SamplingParams) -> list[Any]:
        driver.result(engine_id)
        num_top = len(params.logprob_token_ids) or params.logprobs
        return [each and [each.logprob, each.rank, each.top[:num_top]] for each in driver.logprobs[engine_id]]

    tokens = prompt(60, 15)
    alone = {name: reported(driver.add(tokens, sampling=params), params) for name, params in cases.items()}
    ids = {name: driver.add(tokens, sampling=params) for name, params in cases.items()}
    together = {name: reported(ids[name], params) for name, params in cases.items()}
    return {"alone": alone, "together": together}


def prompt_logprobs(driver: EngineDriver) -> dict[str, Any]:
    """Returns the log-probabilities of a prompt's tokens from whole chunks, and from slices of 16 tokens."""
    tokens, found = prompt(61, 150), {}
    for name, num_rows in (("whole", 10**9), ("sliced", 16)):
        worker_extension.ROWS_PER_SLICE = num_rows
        whole = driver.add(tokens, num_prompt_logprobs=3, stop=StopConditions(1))
        driver.result(whole)
        found[name] = b"".join(driver.prompt_logprobs[whole]).hex()
    return found


class EveryThirdStep:
    """Budgets that let masks be computed in every third step only."""

    def __init__(self) -> None:
        self.num_steps = 0

    def begin_step(self, now: float, clients: Collection[str], is_shared: bool) -> dict[str, float]:
        self.num_steps += 1
        return dict.fromkeys(clients, 0.0 if self.num_steps % 3 else 1.0)

    def spend(self, cpu_s: dict[str, float]) -> None: ...


def skipped(driver: EngineDriver) -> list[dict[str, Any]]:
    """Computes sequences whose grammars may step rarely, beside one without, and the same without limits."""
    grammars = driver.engine._grammars
    own, found = grammars._budgets, []
    sampling = SamplingParams(seed=7, grammar=ARRAY, frequency_penalty=0.5)
    cases = [(sampling, 20), (msgspec.structs.replace(sampling, seed=8), 150), (SamplingParams(seed=9), 30)]
    whole = [driver.run(prompt(90 + number, size), sampling=each) for number, (each, size) in enumerate(cases)]
    grammars._budgets = rare = EveryThirdStep()
    ids = [driver.add(prompt(90 + number, size), sampling=each) for number, (each, size) in enumerate(cases)]
    for tokens, engine_id in zip(whole, ids, strict=True):
        found.append({"whole": tokens, "skipped": driver.result(engine_id)})
    grammars._budgets = own
    return [*found, {"num_steps": rare.num_steps}]


def shares(driver: EngineDriver) -> dict[str, Any]:
    """Computes prompts whose log-probabilities are wanted, with small limits, and a short one beside them."""
    for module in (held_requests, step_shares):
        vars(module).update(ROWS_PER_PROMPT=8, MAX_CLIENT_ROWS=16)
    driver.chunks.clear()
    alone = driver.add(prompt(62, 200), num_prompt_logprobs=1, stop=StopConditions(1))
    driver.result(alone)
    largest_alone = max(driver.chunks)
    wanted = [
        driver.add(prompt(63 + number, 400), num_prompt_logprobs=1, stop=StopConditions(1)) for number in range(3)
    ]
    driver.wait(lambda: wanted[0] in driver.begun)
    driver.chunks.clear()
    short = driver.add(prompt(66, 20), stop=StopConditions(1))
    driver.result(short)
    has_passed = not set(wanted) & set(driver.endings)
    largest = max(driver.chunks)
    driver.chunks.clear()
    driver.run(prompt(68, 200), stop=StopConditions(1))
    largest_beside, is_beside = max(driver.chunks), not set(wanted) & set(driver.endings)
    for each in wanted:
        driver.result(each)
    driver.chunks.clear()
    driver.run(prompt(67, 200), stop=StopConditions(1))
    return {
        "largest_alone": largest_alone,
        "largest": largest,
        "has_passed": has_passed,
        "largest_beside": largest_beside,
        "is_beside": is_beside,
        "largest_after": max(driver.chunks),
        "all_have": all(driver.prompt_logprobs[each] for each in [alone, *wanted]),
    }


def tables(_: EngineDriver) -> dict[str, int]:
    """Returns the sizes that vLLM's second model runner has, which no CPU uses."""
    from vllm import envs
    from vllm.v1.worker.gpu.sample import logit_bias, prompt_logprob

    return {
        "MAX_ALLOWED_TOKENS": logit_bias.MAX_NUM_ALLOWED_TOKEN_IDS,
        "MAX_BIASED_TOKENS": logit_bias.MAX_NUM_LOGIT_BIAS_TOKENS,
        "MAX_STOP_TOKENS": logit_bias.MAX_NUM_STOP_TOKEN_IDS,
        "MAX_BAD_WORDS": envs.VLLM_MAX_NUM_BAD_WORDS,
        "MAX_BAD_WORD_TOKENS": envs.VLLM_MAX_BAD_WORDS_TOTAL_TOKENS,
        "rows of logits": prompt_logprob.CHUNK_SIZE,
    }


def refusals(driver: EngineDriver) -> dict[str, dict[str, str]]:
    """Returns how requests end that are refused, or whose grammar is hostile, and one beside each."""
    found = {}
    cases: dict[str, tuple[SamplingParams, list[int]]] = {
        "invalid grammar": (SamplingParams(grammar="start: (("), []),
        "invalid grammar, resumed": (SamplingParams(grammar="start: (("), [5]),
        "tokens against the grammar": (SamplingParams(grammar=ARRAY), [5]),
        "slow grammar": (SamplingParams(grammar=SLOW), []),
        "top_p": (SamplingParams(top_p=7.0), []),
    }
    for name, (sampling, generated) in cases.items():
        beside = driver.add(prompt(51, 40))
        refused = driver.add(prompt(50, 40), generated=generated, sampling=sampling)
        for each in (refused, beside):
            driver.result(each)
        found[name] = {"refused": driver.endings[refused], "beside": driver.endings[beside]}
    return found


def main() -> None:
    model, *parts, file = sys.argv[1:]
    driver = EngineDriver(model)
    checks: list[Callable[[EngineDriver], Any]] = [
        resumed, memory, layouts, prefixes, moved, aborts, logprobs, prompt_logprobs, shares, skipped, tables,
        pauses, grammars, refusals,
    ]  # fmt: skip
    answer = {"version": importlib.metadata.version("vllm"), "block_size": BLOCK_SIZE}
    answer |= {each.__name__: each(driver) for each in checks if not parts or each.__name__ in parts}
    driver.engine.stop(10.0)
    Path(file).write_text(json.dumps(answer))
    os._exit(0)  # vLLM's own end takes seconds


if __name__ == "__main__":
    main()
