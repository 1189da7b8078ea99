"""CUDA graphs of decode steps, captured for a ladder of batch sizes: a step then costs one launch.

A graph reads its inputs from fixed buffers. A smaller step is padded to the graph's size
(`engine.attention.step_index.StepIndex.padded`). Steps with prompt chunks, and steps larger than the ladder, run
without a graph.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from tandem.engine.attention.step_index import StepIndex
from tandem.engine.cuda.attention import StepTensors, flat_on_host

log = logging.getLogger(__name__)

LADDER = (1, 2, 4, 8, 16, 24, 32, 48, 64)

RunModel = Callable[[StepTensors], torch.Tensor]
"""Returns the logits [num_sequences, vocab_size] of a step of single tokens."""
Capture = Callable[[Callable[[], torch.Tensor]], Callable[[], torch.Tensor]]


def cuda_capture() -> Capture:
    """Return a function that captures a function and returns its replay. All graphs share one memory pool."""
    pool: Any = None

    def capture(function: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        nonlocal pool
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # warm up: first calls select kernels and allocate
            for _ in range(2):
                function()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            output = function()
        pool = graph.pool()

        def replay() -> torch.Tensor:
            graph.replay()
            return output

        return replay

    return capture


class DecodeGraphs:
    """Graphs of one model. max_blocks: of one sequence. capture: `cuda_capture()`, or the identity in CPU tests."""

    def __init__(
        self, run_model: RunModel, max_blocks: int, max_context_len: int, device: torch.device, capture: Capture
    ) -> None:
        self._run_model = run_model
        self._max_blocks = max_blocks
        self._max_context_len = max_context_len
        self._device = device
        self._capture = capture
        self._graphs: dict[int, tuple[StepTensors, Callable[[], torch.Tensor]]] = {}

    def capture_all(self, example: StepIndex) -> None:
        """Capture the largest graph first, so that the others fit in its memory. example: one token of one sequence."""
        for size in reversed(LADDER):
            # A graph is fixed to one context length, so it is captured with the longest.
            padded = example.padded(size, self._max_blocks)
            buffers = StepTensors.of(padded, self._device, self._max_context_len)
            self._graphs[size] = buffers, self._capture(lambda buffers=buffers: self._run_model(buffers))  # type: ignore[misc]
        log.info("captured decode graphs for %s sequences", ", ".join(map(str, LADDER)))

    def run(self, index: StepIndex) -> torch.Tensor | None:
        """Return each sequence's logits, valid until the next run, or None if no graph fits."""
        if index.num_tokens > index.num_sequences:
            return None
        size = next((size for size in LADDER if size >= index.num_sequences), None)
        if size is None:
            return None
        buffers, replay = self._graphs[size]
        buffers.flat.copy_(flat_on_host(index.padded(size, self._max_blocks), self._device), non_blocking=True)
        return replay()[: index.num_sequences]
