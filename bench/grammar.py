"""What a grammar costs a decode step: the same batch with and without one, turn by turn, on the model runner itself.

CPU time of the whole process, so that a mask's time counts though it runs beside the model, and a busy machine disturbs
little; wall time is told, too. Each sequence goes on with the token that was chosen, and begins anew when it ends.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sysconfig
import tempfile
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from llguidance import LLTokenizer
from msgspec.structs import replace
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from bench.engine import CONTEXT, make_model
from bench.report import Aim, Report, add_common_options, finish
from tandem.engine.batch import Batch, BatchItem, Sample
from tandem.engine.config import EngineConfig
from tandem.engine.kv_pool import KVPool
from tandem.engine.loading.model_loader import load_model
from tandem.engine.model_runner import ModelRunner
from tandem.engine.sampling.grammar import Grammar, GrammarState, compile_grammar, make_tokenizer
from tandem.protocol.messages.generation import SamplingParams
from tandem.proxy.api.structured_output import json_schema

NUM_SEQS = (1, 8, 32)
END = 0
SCHEMA = {
    "type": "object",
    "properties": {
        "title": {"type": "string"},
        "year": {"type": "integer"},
        "kind": {"enum": ["film", "series", "play"]},
        "cast": {"type": "array", "items": {"type": "object", "properties": {"name": {"type": "string"}}}},
    },
    "required": ["title", "year", "kind", "cast"],
    "additionalProperties": False,
}
GRAMMARS = {
    "schema": f"start: %json {json.dumps(json_schema(SCHEMA, True))}",
    "any object": f"start: %json {json.dumps(json_schema({'type': 'object'}, True))}",
}


def train_tokenizer(vocab_size: int) -> LLTokenizer:
    """A byte-level BPE over Python's own library, as large as a model's."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train([str(file) for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))], trainer)
    return make_tokenizer(bpe.to_str(), vocab_size, END)


class Sequences:
    """A batch that decodes on and on. text: of its grammar, or none."""

    def __init__(self, runner: ModelRunner, num_seqs: int, block_size: int, tokenizer: LLTokenizer, text: str | None):
        self._runner = runner
        self._num_blocks = -(-CONTEXT // block_size)
        self._grammar: Grammar | None = None
        if text is not None:
            compiled: Future[Any] = Future()
            compiled.set_result(compile_grammar(tokenizer, text))
            read: Future[LLTokenizer] = Future()
            read.set_result(tokenizer)
            self._grammar = Grammar(compiled, read)
        self._params = SamplingParams(temperature=1.0, grammar=text)
        self._states: list[GrammarState | None] = [self._new_state() for _ in range(num_seqs)]
        self._outputs: list[list[int]] = [[] for _ in range(num_seqs)]
        self._num_steps = 0

    def _new_state(self) -> GrammarState | None:
        return None if self._grammar is None else self._grammar.new_state({END})

    def step(self) -> tuple[float, float]:
        """CPU and wall seconds."""
        self._num_steps += 1
        items = []
        for i, (state, output) in enumerate(zip(self._states, self._outputs, strict=True)):
            seeded = replace(self._params, seed=1000 * i + self._num_steps)
            table = list(range(i * self._num_blocks, (i + 1) * self._num_blocks))
            sample = Sample(seeded, output_token_ids=output, grammar=state)
            items.append(BatchItem([output[-1] if output else 1], CONTEXT - 1, table, [sample]))
        started = time.process_time(), time.perf_counter()
        results = self._runner.run(Batch(items))
        took = time.process_time() - started[0], time.perf_counter() - started[1]
        for i, result in enumerate(results):
            assert result.error is None
            [token] = result.tokens
            if token.token_id == END and self._grammar is not None:
                self._states[i], self._outputs[i] = self._new_state(), []
            else:
                self._outputs[i].append(token.token_id)
        return took


def measure(runner: ModelRunner, block_size: int, tokenizer: LLTokenizer, num_steps: int) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for num_seqs in NUM_SEQS:
        kinds = {None: "none"} | {text: name for name, text in GRAMMARS.items()}
        batches = {name: Sequences(runner, num_seqs, block_size, tokenizer, text) for text, name in kinds.items()}
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in batches}
        for _ in range(num_steps):
            for name, batch in batches.items():
                times[name].append(batch.step())
        of_batch = figures[str(num_seqs)] = {}
        for name, taken in times.items():
            taken = taken[len(taken) // 5 :]  # the first masks of a grammar fill its caches
            cpu, wall = ([t[kind] for t in taken] for kind in (0, 1))
            of_batch[name] = {
                "cpu_ms": 1e3 * statistics.median(cpu),
                "mean_cpu_ms": 1e3 * statistics.fmean(cpu),
                "wall_ms": 1e3 * statistics.median(wall),
            }
            for key in ("cpu_ms", "mean_cpu_ms", "wall_ms"):
                of_batch[name][f"ratio_of_{key}"] = of_batch[name][key] / of_batch["none"][key]
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.grammar", description=__doc__)
    add_common_options(parser)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    folder = make_model(Path(tempfile.gettempdir()) / "tandem-bench" / "llama100m")
    config = EngineConfig(model=str(folder), device="cpu", kv_cache_bytes=1 << 29)
    loaded = load_model(config)
    runner = ModelRunner(loaded, KVPool(loaded, config))
    runner.warm_up()
    tokenizer = train_tokenizer(loaded.vocab_size)
    figures = measure(runner, config.block_size, tokenizer, num_steps=10 if arguments.quick else 60)
    aims = [
        Aim.of(
            f"step of 8 with a grammar ({name}) over one without", figures["8"][name]["ratio_of_cpu_ms"], 1.1, "lower"
        )
        for name in GRAMMARS
    ]
    finish(Report.of("grammar", figures, aims), arguments.json)


if __name__ == "__main__":
    main()
