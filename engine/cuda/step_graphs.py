"""CUDA graphs of steps, for a ladder of sizes: a step then costs one launch.

Steps of single tokens have graphs for every number of sequences up to `GraphLimits.max_num_seqs`, steps with prompt
chunks for up to 1,024 tokens. Larger steps run without graphs: the GPU computes for longer than the host launches.

A graph reads its inputs from a fixed buffer. A smaller step is padded to the graph's size with sequences that read and
write nothing (`engine.attention.step_index.StepIndex.padded`). The ranks of a worker run the same steps, so they
capture the same graphs in the same order.

The logits of all graphs are in one buffer, and the block tables in another. A graph that cannot be captured is left
out; the others stay.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from tandem.engine.attention.step_index import StepIndex
from tandem.engine.batch import BatchItem
from tandem.engine.cuda.step_tensors import SPLIT, StepTensors, num_splits
from tandem.engine.cuda.streams import Capture
from tandem.engine.engine_config import EngineConfig

log = logging.getLogger(__name__)

_MIN_CHUNK_TOKENS = 32
_MAX_CHUNK_TOKENS = 1024
_MORE_SPLITS = 4096
"""Splits of all sequences beyond one each: two million tokens of context."""

RunModel = Callable[[StepTensors], torch.Tensor]
"""Returns the logits [num_sequences, vocab_size] of each sequence's last token."""


class NotCapturedError(Exception):
    """A step's graph cannot be captured. Its cause says why."""


@dataclass(frozen=True)
class GraphLimits:
    """The steps that a worker may run: sequences, and prompt tokens. decodes: False if it only computes prompts.

    max_graph_tokens: of steps from graphs, if the model cannot be captured with more.

    A worker that only computes prompts captures no graphs of single tokens at startup. Should its role change, each is
    captured when it is first needed.
    """

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    decodes: bool = True
    max_graph_tokens: int = 1 << 20

    @classmethod
    def of(cls, config: EngineConfig, decodes: bool = True) -> GraphLimits:
        return cls(config.max_num_seqs, config.max_num_batched_tokens, decodes)

    @property
    def sizes(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """(tokens, sequences) of graphs of single tokens, and of graphs with prompt chunks, ascending."""
        decode = [(size, size) for size in ladder(1, min(self.max_graph_tokens, self.max_num_seqs))]
        most = min(_MAX_CHUNK_TOKENS, self.max_graph_tokens, self.max_num_batched_tokens + self.max_num_seqs)
        # One sequence more than are needed takes the padding.
        chunks = [(size, min(size, self.max_num_seqs) + 1) for size in ladder(min(_MIN_CHUNK_TOKENS, most), most)]
        return decode, chunks

    @property
    def row_counts(self) -> list[int]:
        """Numbers of rows that the products of layers have in graphs, ascending."""
        return sorted({num_tokens for sizes in self.sizes for num_tokens, _ in sizes})

    @property
    def head_row_counts(self) -> list[int]:
        """The same of the output projection, which has a row for each sequence."""
        return sorted({num_sequences for sizes in self.sizes for _, num_sequences in sizes})


class GraphShape(NamedTuple):
    """Size of the steps that one graph runs. max_splits: see `StepTensors`."""

    num_tokens: int
    num_sequences: int
    max_splits: int

    def holds(self, index: StepIndex) -> bool:
        is_full = index.num_tokens == self.num_tokens
        return (
            index.num_tokens <= self.num_tokens
            and index.num_sequences + (not is_full) <= self.num_sequences
            and num_splits(index) <= self.max_splits
        )


def ladder(smallest: int, largest: int) -> list[int]:
    """Returns sizes from smallest to largest, each at most half larger than the one before, or by 1."""
    sizes, size = [], smallest
    while size < largest:
        sizes.append(size)
        size = max(size + 1, size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3)
    return [*sizes, largest]


class StepGraphs:
    """The graphs of one model.

    max_blocks: of one sequence. capture: `streams.cuda_capture()`, or a double in tests.
    """

    def __init__(
        self,
        run_model: RunModel,
        limits: GraphLimits,
        block_size: int,
        max_blocks: int,
        capture: Capture,
    ) -> None:
        self._run_model = run_model
        self._limits = limits
        self._block_size = block_size
        self._max_blocks = max_blocks
        self._capture = capture

        def shape(num_tokens: int, num_sequences: int) -> GraphShape:
            longest = -(-max_blocks * block_size // SPLIT)
            # Limits the memory for their results. Steps with more splits run without a graph.
            return GraphShape(num_tokens, num_sequences, min(num_sequences * longest, num_sequences + _MORE_SPLITS))

        decode, chunks = limits.sizes
        self.decode_shapes = [shape(*size) for size in decode]
        self.chunk_shapes = [shape(*size) for size in chunks]
        self._graphs: dict[GraphShape, tuple[StepTensors, Callable[[], torch.Tensor]]] = {}
        self._max_rows = max(shape.num_sequences for shape in (*self.decode_shapes, *self.chunk_shapes))
        # Shared by all graphs, of `_max_rows` rows; from the first capture on.
        self._tables: torch.Tensor | None = None
        self._logits: torch.Tensor | None = None

    @property
    def captured(self) -> list[GraphShape]:
        """In the order of capture."""
        return list(self._graphs)

    def startup_steps(self) -> Iterator[list[BatchItem]]:
        """Steps whose graphs are captured at startup: the largest first, so that the others fit in its memory."""
        size = min(self._block_size, _MIN_CHUNK_TOKENS)
        for shape in reversed(self.chunk_shapes):
            starts = range(0, shape.num_tokens, size)
            yield [BatchItem([0] * min(size, shape.num_tokens - start), 0, [0]) for start in starts]
        for shape in reversed(self.decode_shapes) if self._limits.decodes else ():
            yield [BatchItem([0], 0, [0])] * shape.num_tokens

    def shape_for(self, index: StepIndex) -> GraphShape | None:
        """Returns the smallest graph that holds the step, if any."""
        shapes = self.decode_shapes if index.num_tokens == index.num_sequences else self.chunk_shapes
        return next((shape for shape in shapes if shape.holds(index)), None)

    def run(self, shape: GraphShape, padded: StepIndex, flat: torch.Tensor) -> torch.Tensor:
        """Returns each sequence's logits, valid until the next run.

        padded: the step, of the graph's number of tokens and sequences. flat: `flat_on_host(padded)`, on the device.
        Captures the graph if there is none yet. If that fails, raises NotCapturedError, and leaves the shape out.
        """
        step = StepTensors.of(flat, padded, shape.max_splits)
        if shape not in self._graphs:
            try:
                self._graphs[shape] = self._captured(step)
            except Exception as problem:
                self.decode_shapes = [each for each in self.decode_shapes if each != shape]
                self.chunk_shapes = [each for each in self.chunk_shapes if each != shape]
                raise NotCapturedError from problem
            log.debug("captured the graph of %d tokens of %d sequences", shape.num_tokens, shape.num_sequences)
        buffers, replay = self._graphs[shape]
        buffers.copy_(step)
        return replay()

    def _captured(self, step: StepTensors) -> tuple[StepTensors, Callable[[], torch.Tensor]]:
        """Captures a step, and returns the tensors that its graph reads, and its replay."""
        if self._tables is None:
            self._tables = step.block_table.new_zeros((self._max_rows, self._max_blocks))
        buffers = step.buffers(self._tables)
        buffers.copy_(step)
        if self._logits is None:
            logits = self._run_model(buffers)
            self._logits = logits.new_empty((self._max_rows, logits.shape[1]))
        output = self._logits[: len(step.num_context)]
        return buffers, self._capture(lambda: output.copy_(self._run_model(buffers)))
