"""Thirty prompts of different lengths, none seen before: a new length must not cost more than the same length again.

    python -m bench.gpu.prompt_lengths [--device cpu] [--quick] [--json FILE]

Kernels or plans that are compiled for each step shape would show as first times far above second ones.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time

from transformers import LlamaConfig

from bench.gpu.families import COMMON, GREEDY, new_runner
from bench.gpu.part import Part
from tandem.engine.batch import Batch, BatchItem

NUM_LENGTHS, MAX_LENGTH = 30, 1000
MAX_RATIO = 3.0


def main() -> None:
    part = Part("prompt_lengths", __doc__)
    lengths = random.Random(5).sample(range(20, MAX_LENGTH), 5 if part.quick else NUM_LENGTHS)
    with tempfile.TemporaryDirectory() as folder:
        LlamaConfig(**COMMON, architectures=["LlamaForCausalLM"]).save_pretrained(folder)
        runner = new_runner(folder, "bfloat16" if part.device == "cuda" else "float32", part.device, "dummy")

    def seconds(length: int) -> float:
        began = time.perf_counter()
        runner.run(Batch([BatchItem([5] * length, 0, list(range(64)), [GREEDY])]))
        return time.perf_counter() - began

    seconds(16)
    first = {length: seconds(length) for length in lengths}
    second = {length: statistics.median(seconds(length) for _ in range(3)) for length in lengths}
    ratio = statistics.median(first[length] / second[length] for length in lengths)
    part.add("first_ms", {str(length): 1e3 * s for length, s in first.items()})
    part.add("again_ms", {str(length): 1e3 * s for length, s in second.items()})
    part.add("median first / again", ratio)
    with part.case("a new length costs what the same length costs again"):
        slow = [length for length in lengths if first[length] > MAX_RATIO * second[length] + 0.02]
        assert part.device == "cpu" or (ratio < MAX_RATIO and len(slow) < 4), f"slow at first: {slow}"
    part.end()


if __name__ == "__main__":
    main()
