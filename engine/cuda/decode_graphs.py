"""Captured CUDA graphs of decode steps, one for each size of a ladder: a step then costs one launch.

A graph reads its inputs from buffers that stay where they are. A step with fewer sequences than its graph is filled up
with copies of its first (`engine.attention.step_index.StepIndex.padded`). Steps with chunks of prompts, or larger
than the
ladder, run as they are.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch

from tandem.engine.attention.step_index import StepIndex
from tandem.engine.cuda.attention import StepTensors

log = logging.getLogger(__name__)

LADDER = (1, 2, 4, 8, 16, 24, 32, 48, 64)

RunModel = Callable[[StepTensors], torch.Tensor]
"""Logits [num_sequences, vocab_size] of a step of single tokens."""
Capture = Callable[[Callable[[], torch.Tensor]], Callable[[], torch.Tensor]]


def cuda_capture() -> Capture:
    """Captures a function and returns its replay. The graphs share their memory: they never run at once."""
    pool: Any = None

    def capture(function: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        nonlocal pool
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # first calls choose kernels and allocate, which a capture must not
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
    """max_blocks: of one sequence. capture: `cuda_capture`; tests on CPU hand in the identity."""

    def __init__(
        self,
        run_model: RunModel,
        max_blocks: int,
        max_context_len: int,
        device: torch.device,
        capture: Capture,
        ladder: tuple[int, ...] = LADDER,
    ) -> None:
        self._run_model = run_model
        self._max_blocks = max_blocks
        self._max_context_len = max_context_len
        self._device = device
        self._capture = capture
        self._ladder = ladder
        self._graphs: dict[int, tuple[StepTensors, Callable[[], torch.Tensor]]] = {}

    def capture_all(self, example: StepIndex) -> None:
        """The largest first, so that the others fit into its memory. `example`: one token of one sequence."""
        for size in sorted(self._ladder, reverse=True):
            buffers = self._tensors(example.padded(size, self._max_blocks))
            self._graphs[size] = buffers, self._capture(lambda buffers=buffers: self._run_model(buffers))  # type: ignore[misc]
        log.info("captured decode graphs of %s sequences", ", ".join(map(str, self._ladder)))

    def run(self, index: StepIndex) -> torch.Tensor | None:
        """Logits of each sequence, or None when no graph fits. They are valid until the next run."""
        if index.max_query_len > 1 or not self._graphs:
            return None
        size = next((size for size in sorted(self._graphs) if size >= index.num_sequences), None)
        if size is None:
            return None
        buffers, replay = self._graphs[size]
        new = self._tensors(index.padded(size, self._max_blocks))
        for field in fields(StepTensors):
            buffer = getattr(buffers, field.name)
            if isinstance(buffer, torch.Tensor):
                buffer.copy_(getattr(new, field.name), non_blocking=True)
        return replay()[: index.num_sequences]

    def _tensors(self, index: StepIndex) -> StepTensors:
        step = StepTensors.of(index, self._device)
        values = {field.name: getattr(step, field.name) for field in fields(StepTensors)}
        # A graph cannot know how long contexts will be, so it is told the most.
        return StepTensors(**values | {"max_context_len": self._max_context_len})
