"""Whole steps of a model in which one sequence's grammar is hostile: the others are served, and soon."""

from __future__ import annotations

import re
import time
from pathlib import Path

from tokenizers import Tokenizer

from tandem.engine.batch import Batch, BatchItem, Sample
from tandem.engine.engine_config import EngineConfig
from tandem.engine.kv_cache.kv_pool import KVPool
from tandem.engine.loading.model_loader import load_model
from tandem.engine.model_runner import ModelRunner
from tandem.engine.sampling.grammar import MASKS_TIMEOUT_S
from tandem.engine.sampling.grammars import Grammars
from tandem.protocol.messages.sampling import SamplingParams
from tests.support.hostile_grammars import ambiguous


def test_a_hostile_grammar_fails_alone_and_delays_one_step_of_the_others(noise_model: Path) -> None:
    config = EngineConfig(model=str(noise_model), dtype="float32", device="cpu", block_size=16, kv_cache_bytes=1 << 24)
    loaded = load_model(config)
    runner = ModelRunner(loaded, KVPool(loaded, config))
    runner.warm_up()  # compiles kernels
    grammars = Grammars(str(noise_model), loaded.vocab_size, lambda: None)
    try:
        hostile, fine = grammars.get(ambiguous(20_000)), grammars.get("start: /[ab]+/")
        assert hostile is not None and fine is not None
        hostile.process()
        fine.process()
        slow, state, output = hostile.new_state({0}), fine.new_state({0}), list[int]()
        params = SamplingParams(temperature=1.0, grammar="x")
        durations = []
        for position in range(8):
            samples = [Sample(params, output_token_ids=list(output), grammar=state)]
            items = [BatchItem([output[-1] if output else 5], position, [1], samples)]
            if position in (0, 3):  # such a request comes again
                items.append(BatchItem([5], 0, [2], [Sample(params, grammar=slow)]))
            begun = time.monotonic()
            results = runner.run(Batch(items))
            durations.append(time.monotonic() - begun)
            assert results[0].error is None
            output.append(results[0].tokens[0].token_id)
            for result in results[1:]:
                assert result.error is not None and "too complex" in result.error.message
    finally:
        grammars.close()
    text = Tokenizer.from_file(str(noise_model / "tokenizer.json")).decode(output)
    assert re.fullmatch("[ab]+", text.strip()), text
    assert max(durations) < MASKS_TIMEOUT_S + 2
