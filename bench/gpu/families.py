"""Greedy output of six model families against transformers, token by token, with tiny random models made on the spot.

    python -m bench.gpu.families [--device cpu] [--quick] [--json FILE]

Prompts are computed in odd chunks, mixed with single tokens of other sequences. In float32, so that rounding seldom
changes a choice; in bfloat16, output from CUDA graphs equals output without them in nearly all tokens.
"""

from __future__ import annotations

import random
import tempfile
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from bench.gpu.part import Part
from tandem.engine.batch import Batch, BatchItem, Sample
from tandem.engine.engine_config import EngineConfig
from tandem.engine.kv_cache.kv_pool import KVPool
from tandem.engine.loading.model_loader import load_model
from tandem.engine.model_runner import ModelRunner
from tandem.protocol.messages.sampling import SamplingParams

BLOCK_SIZE, VOCAB_SIZE = 16, 512
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 1024,
    "initializer_range": 0.2, "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": 0,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "mistral": {"sliding_window": 24},
    "gemma2": {"attn_logit_softcapping": 5.0, "sliding_window": 24},
    "gpt_oss": {"sliding_window": 24, "num_local_experts": 4, "num_experts_per_tok": 2},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}
"""Plain, normalised queries and keys, sliding windows, soft caps, sinks, experts."""
GREEDY = Sample(SamplingParams(temperature=0.0))


def new_runner(folder: str, dtype: Any, device: Any, load_format: Any = "auto") -> ModelRunner:
    config = EngineConfig(
        folder, dtype=dtype, device=device, block_size=BLOCK_SIZE, kv_cache_bytes=1 << 27, load_format=load_format
    )
    loaded = load_model(config)
    runner = ModelRunner(loaded, KVPool(loaded, config))
    runner.warm_up()
    return runner


def generate(runner: ModelRunner, prompts: list[list[int]], num_new: int) -> list[list[int]]:
    """Returns the new tokens of each prompt."""
    rng = random.Random(0)
    tokens, done = [list(prompt) for prompt in prompts], [0] * len(prompts)
    blocks = rng.sample(range(1, 200), 198)
    tables = [[blocks.pop() for _ in range(-(-(len(p) + num_new) // BLOCK_SIZE))] for p in prompts]
    ends = [len(prompt) + num_new for prompt in prompts]
    while live := [i for i, t in enumerate(tokens) if len(t) < ends[i]]:
        items = []
        for i in live:
            chunk = tokens[i][done[i] : done[i] + rng.choice([7, 16, 33])]
            samples = [GREEDY] if done[i] + len(chunk) == len(tokens[i]) else []
            items.append(BatchItem(chunk, done[i], tables[i], samples))
        for i, item, output in zip(live, items, runner.run(Batch(items)), strict=True):
            done[i] += len(item.token_ids)
            tokens[i] += [token.token_id for token in output.tokens]
    return [t[len(p) :] for t, p in zip(tokens, prompts, strict=True)]


def reference(model: Any, prompts: list[list[int]], num_new: int, device: str) -> list[list[int]]:
    outputs = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=device)
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_new, do_sample=False)
        outputs.append(out[0, len(prompt) :].tolist())
    return outputs


def share_equal(some: list[list[int]], others: list[list[int]]) -> float:
    pairs = [(a, b) for x, y in zip(some, others, strict=True) for a, b in zip(x, y, strict=True)]
    return sum(a == b for a, b in pairs) / len(pairs)


def check_family(part: Part, family: str, folder: str) -> None:
    num_new = 8 if part.quick or part.device == "cpu" else 24
    rng = random.Random(3)
    lengths = (1, 17, 40) if part.quick else (1, 15, 16, 17, 64, 130, 300)
    prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in lengths]
    torch.manual_seed(1)
    config = CONFIG_MAPPING[family](**COMMON, **FAMILIES[family])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    expected = reference(model.to(part.device).eval(), prompts, num_new, part.device)
    share = share_equal(generate(new_runner(folder, "float32", part.device), prompts, num_new), expected)
    part.add(f"{family}: share of tokens that are equal to transformers'", share)
    assert share == 1 if part.device == "cpu" else share > 0.97, f"{share:.1%} of the tokens are equal"
    if part.device == "cuda":
        runner = new_runner(folder, "bfloat16", "cuda")
        part.add(f"{family}: has graphs", runner._graphs is not None)
        with_graphs, runner._graphs = generate(runner, prompts, num_new), None
        share = share_equal(with_graphs, generate(runner, prompts, num_new))
        part.add(f"{family}: share of bfloat16 tokens that are equal with and without graphs", share)
        assert share > 0.85, f"{share:.1%} of the tokens are equal with and without graphs"


def main() -> None:
    part = Part("families", __doc__)
    torch.backends.cuda.matmul.allow_tf32 = False
    for family in list(FAMILIES)[: 2 if part.quick else None]:
        with part.case(family), tempfile.TemporaryDirectory() as folder:
            check_family(part, family, folder)
    part.end()


if __name__ == "__main__":
    main()
