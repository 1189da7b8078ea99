"""Whether a row's bits depend on the rest of a step with --exact, on this GPU: products, attention, sums, whole steps.

    python -m bench.gpu.exactness [--device cpu] [--quick] [--json FILE]

Beside it, which products depend on it by default, and what exact steps cost: eight layers of the shape of Llama 3.1 8B
with random weights, each way in a process of its own, because libraries read their settings once. On CPU the kernels
are interpreted, and no steps are run.
"""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from bench.gpu.engine import LLAMA_8B, TINY, decode_items, new_runner, prompt, seconds
from bench.gpu.kernels import new_pool
from bench.gpu.part import Part
from tandem.deploy.processes.gpu_environment import EXACT_PRODUCTS
from tandem.engine.attention.interface import AttentionOptions
from tandem.engine.batch import Batch, BatchItem, Sample
from tandem.engine.cuda.step_graphs import GraphLimits
from tandem.engine.exactness import chunk_problem
from tandem.engine.model_runner import ModelRunner
from tandem.engine.row_products import ExactLinear, product_problem, use_exact_products
from tandem.engine.sampling.logprobs import logprob_columns
from tandem.engine.sampling.sampler import log_total
from tandem.protocol.messages.sampling import SamplingParams

NUM_LAYERS = 8
LIMITS = GraphLimits(max_num_seqs=256, max_num_batched_tokens=2048)
CPU_ROW_COUNTS = [32, 96]
"""Products of float32 in a CPU's library have the same bits for these numbers of rows."""
VOCABULARIES = (128256, 50257)
"""The rows of the second one begin at addresses that are aligned differently."""
SAMPLES = [
    Sample(SamplingParams(temperature=0.8, seed=5, top_p=0.9, logprobs=5)),
    Sample(SamplingParams(temperature=1.0, seed=6, logprobs=5)),
    Sample(SamplingParams(temperature=0.0, logprobs=5)),
]
CHUNKS = ([200], [1, 63, 100, 36], [64] * 3 + [1] * 8, [150, *[1] * 50])
"""Of a prompt of 200 tokens."""


class Steps(NamedTuple):
    """What one process has found. problem: of the exact runner. times_ms: by kind of step."""

    problem: str
    differing: list[str]
    times_ms: dict[str, float]


def weights_of(shape: dict[str, Any]) -> list[tuple[int, int]]:
    """(outputs, inputs) of the products of a layer, merged as the engine merges them, and of the output projection."""
    hidden, inner, heads = shape["hidden_size"], shape["intermediate_size"], shape["num_attention_heads"]
    head_dim = shape.get("head_dim", hidden // heads)
    qkv = (heads + 2 * shape["num_key_value_heads"]) * head_dim
    return [
        (qkv, hidden),
        (hidden, heads * head_dim),
        (2 * inner, hidden),
        (hidden, inner),
        (shape["vocab_size"], hidden),
    ]


def differing_products(shape: dict[str, Any], limits: GraphLimits | None, dtype: torch.dtype, device: str) -> list[str]:
    """Returns what `product_problem` says of each weight, where it says something. limits: None on CPUs."""
    found = []
    for size in weights_of(shape):
        is_head = size[0] == shape["vocab_size"]
        counts = CPU_ROW_COUNTS
        if limits is not None:
            counts = limits.head_row_counts if is_head else limits.row_counts
        weight = torch.randn(size, device=device).mul_(0.02).to(dtype)
        found.append(product_problem([ExactLinear(weight, None, counts)], counts, dtype, torch.device(device)))
    return [problem for problem in found if problem]


def check_attention(part: Part) -> None:
    """Tokens of a prompt one by one, in one chunk, and in chunks of 33."""
    on_gpu = part.device == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    for head_dim, window in ((128, 0), (64, 100), (80, 0)) if on_gpu else ((32, 0),):
        with part.case(f"attention in chunks, heads of {head_dim}, window {window}"):
            pool = new_pool(64, head_dim, 2, dtype, part.device)
            pool.model_dtype = dtype
            if not on_gpu:
                pool.tensor = pool.tensor[:1]  # 64 tokens: the interpreter is slow
            options = AttentionOptions(head_dim**-0.5, window)
            heads = SimpleNamespace(num_heads=8, options=options)
            layers: Any = [SimpleNamespace(head_parameters=heads)]
            assert not (problem := chunk_problem(pool, layers)), problem


def check_sums(part: Part) -> None:
    """Log-probabilities of a row with equal logits, at several places among others and alone."""
    for vocab_size in VOCABULARIES if part.device == "cuda" else VOCABULARIES[1:]:
        with part.case(f"log-probabilities of {vocab_size} tokens"):
            logits = torch.randn((7, vocab_size), generator=torch.Generator().manual_seed(1)).mul_(3).bfloat16()
            logits[5] = logits[2]
            logits, tokens = logits.to(part.device), torch.arange(7, device=part.device)
            tokens[5] = tokens[2]
            together, total = logprob_columns(logits, tokens, 20), log_total(logits.float())
            alone = logprob_columns(logits[2:3].clone(), tokens[2:3], 20)
            assert torch.equal(together[2], alone[0]) and torch.equal(together[2], together[5])
            assert torch.equal(total[2], total[5]) and torch.equal(total[2:3], log_total(logits[2:3].float().clone()))


def run_steps(device: str, shape: dict[str, Any], repeat: int, exact: bool) -> Steps:
    """Called in a process of its own."""
    if exact:
        os.environ.update(EXACT_PRODUCTS)  # before the first product
    runner = new_runner(shape, device, exact=exact)
    problem = runner.gpu_problem or different_answers(runner) if exact else ""
    differing = [] if exact else differing_products(shape, LIMITS, torch.bfloat16, device)
    batches = {f"decode of {size}": Batch(decode_items(size)) for size in (1, 16, 64, 256)}
    batches["prefill of 2048"] = prompt(2048)
    return Steps(
        problem,
        differing,
        {what: seconds(partial(runner.run, batch), repeat, device) * 1e3 for what, batch in batches.items()},
    )


def different_answers(runner: ModelRunner) -> str:
    """Samples behind each chunk of a prompt, alone and beside others. Returns where the answers differ, or nothing."""
    tokens = [(7 * i) % 500 for i in range(200)]
    others = [BatchItem([3] * 40, 0, [20]), *decode_items(20)[-12:]]
    answers: dict[int, Any] = {}
    for chunks in CHUNKS:
        for beside in ([], others):
            start = 0
            for size in chunks:
                item = BatchItem(tokens[start : start + size], start, list(range(1, 5)), SAMPLES)
                start += size
                found = runner.run(Batch([*beside, item]))[-1].tokens
                if answers.setdefault(start, found) != found:
                    return f"other log-probabilities behind {start} tokens, in chunks of {chunks[:3]}"
    return ""


def main() -> None:
    part = Part("exactness", __doc__)
    part.interpret_kernels()
    if part.device == "cpu":
        with part.case("products"):
            assert not (found := differing_products(TINY, None, torch.float32, "cpu")), found
        check_attention(part)
        check_sums(part)
        part.end()
    shape = LLAMA_8B | {"num_hidden_layers": NUM_LAYERS}
    repeat = 5 if part.quick else 20
    results = {}
    for exact in (True, False):
        with part.case("exact steps" if exact else "steps by default"):
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
                results[exact] = process.submit(run_steps, part.device, shape, repeat, exact).result()
            assert not results[exact].problem, results[exact].problem
    if False in results:
        part.add("products whose rows depend on the others by default", results[False].differing)
    for what, by_default in results[False].times_ms.items() if len(results) == 2 else ():
        part.compare(f"exact: {what}, 8 layers, ms (predicted: default)", results[True].times_ms[what], by_default)
    os.environ.update(EXACT_PRODUCTS)
    use_exact_products()
    with part.case("products"):
        assert not (found := differing_products(LLAMA_8B, LIMITS, torch.bfloat16, part.device)), found
    check_attention(part)
    check_sums(part)
    part.end()


if __name__ == "__main__":
    main()
