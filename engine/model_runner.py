"""Runs one step: prompt chunks and single tokens through the model, then the sampler."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from tandem.engine.attention.interface import NO_WINDOW, StepAttention
from tandem.engine.attention.plain import PlainAttention
from tandem.engine.attention.step_index import StepIndex
from tandem.engine.batch import Batch, BatchItem, ItemOutput, Sample
from tandem.engine.cuda.experts import largest_step_without_waits
from tandem.engine.cuda.fused_layers import CUDALayerOperators
from tandem.engine.cuda.step_graphs import GraphLimits, GraphShape, NotCapturedError, StepGraphs
from tandem.engine.cuda.step_tensors import StepTensors, flat_on_host
from tandem.engine.cuda.streams import Array, Capture, cuda_capture, end_of_work, upload
from tandem.engine.cuda.triton_attention import TritonAttention, triton_problem
from tandem.engine.exactness import gpu_problem, use_exact_head
from tandem.engine.kv_cache.kv_pool import KVPool
from tandem.engine.layers.fusing import fuse_final_norm, fuse_layers
from tandem.engine.loaded_model import LoadedModel
from tandem.engine.lora.layers import StepAdapters, wrap_layers
from tandem.engine.model_head import ModelHead
from tandem.engine.row_products import use_exact_products
from tandem.engine.sampling.grammar_mask import GrammarMasks, StepMask
from tandem.engine.sampling.sampler import SamplingStep
from tandem.engine.steps.launched_step import (
    FedTokens,
    LaunchedStep,
    SampleAfter,
    Sampling,
    are_samples_known,
    samples_after,
)
from tandem.engine.vision.media_input import MediaInput, positions_of
from tandem.protocol.messages.sampling import SampledToken, SamplingParams, TokenLogprobs
from tandem.runtime.errors import ErrorInfo, InvalidRequest, first_line

log = logging.getLogger(__name__)


class _BegunSampling(NamedTuple):
    """The host's share of a step's sampling. masking: masks of grammars, which another thread computes."""

    step: SamplingStep
    masking: Future[StepMask] | None


class ModelRunner:
    """Owns the model, on the engine thread. limits: for CUDA graphs."""

    def __init__(self, loaded: LoadedModel, pool: KVPool, limits: GraphLimits | None = None) -> None:
        self._model = loaded.model
        self._media_input = MediaInput(loaded.vision, loaded.model) if loaded.vision is not None else None
        self._pool = pool
        self.device = loaded.device
        self._max_model_len = loaded.max_model_len
        self._vocab_size = loaded.vocab_size
        self._uses_triton = uses_triton(pool, self._model.config.get_text_config(decoder=True))
        limits = limits or GraphLimits()
        self._loaded = loaded
        self._row_counts = limits.row_counts if loaded.is_exact and loaded.device.type == "cuda" else None
        if self._uses_triton:
            operators = CUDALayerOperators(self._row_counts)
            fuse_layers(self._model, operators)
            fuse_final_norm(self._model, operators)
            if self._row_counts is not None:
                use_exact_products()
                use_exact_head(self._model, limits.head_row_counts)
        if loaded.device.type == "cpu":
            # Imported here because it loads a compiler, which GPU workers may lack.
            from tandem.engine.cpu.prepared_model import prepare_model

            prepare_model(loaded)
        self._make_attention = attention_maker(pool)
        self._graphs: StepGraphs | None = None
        if self._uses_triton:
            self.use_graphs(limits, cuda_capture())
        self._lora_modules = loaded.lora_modules
        self._adapters: StepAdapters | None = None  # from the first step with an adapter on
        self._grammar_masks = GrammarMasks()

    def run(self, batch: Batch) -> list[ItemOutput]:
        """Runs a step and returns one output per item, when the device is done."""
        return self.launch(batch).result()

    @torch.inference_mode()
    def launch(self, batch: Batch, before: LaunchedStep | None = None) -> LaunchedStep:
        """Queues a step on the device, behind the steps that were launched before.

        before: the step of the last launch; required if items follow it (`BatchItem.follows`), except on ranks other
        than 0.
        """
        sample = self._launch(batch, before)
        sampling = sample([]) if are_samples_known(batch.items) else sample
        return LaunchedStep(sampling, end_of_work(self.device))

    @property
    def gpu_problem(self) -> str:
        """Why answers that must be exact depend on the batch on this GPU, as one sentence. Empty if they do not, if
        they need not be exact, and on CPUs.

        Tries all products of the model, which takes about a second.
        """
        if self._row_counts is None:
            return ""
        if not self._uses_triton:
            return "its attention does not use our kernels, so sums have another order in another batch"
        return gpu_problem(self._loaded, self._pool, self._row_counts)

    def wait(self) -> None:
        """Waits for the work that is queued on the device."""
        end_of_work(self.device)()

    def why_lost(self, error: BaseException) -> str:
        """Returns why this process must end after a step that failed with `error`, or an empty string."""
        reason = why_lost(error, self.device)
        return f"the device has failed; the worker ends: {reason}" if reason else ""

    def _launch(self, batch: Batch, before: LaunchedStep | None) -> SampleAfter:
        """Queues the model. The result queues the sampling."""
        if batch.block_copies:
            sources, destinations = upload([np.array(batch.block_copies, np.int64)], self.device)[0].unbind(1)
            words = self._pool.as_blocks().view(torch.int64)
            words[destinations] = words[sources]
        if batch.encodes or any(item.media is not None or item.adapter is not None for item in batch.items):
            return self._launch_with_attachments(batch, before)
        return self._launch_items(batch.items, before)

    def _launch_with_attachments(self, batch: Batch, before: LaunchedStep | None) -> SampleAfter:
        """Runs a step with media or LoRA adapters. Items whose media or adapter failed get an error."""
        if batch.encodes or any(item.media is not None for item in batch.items):
            if self._media_input is None:
                raise InvalidRequest("this model does not accept images or video")
            self._media_input.prepare(batch)
        failed = {
            number: ItemOutput([], error=error)
            for number, item in enumerate(batch.items)
            if (error := _attachment_error(item)) is not None
        }
        items = [item for number, item in enumerate(batch.items) if number not in failed]
        if any(item.adapter is not None for item in items) and self._adapters is None:
            self._adapters = StepAdapters()
            wrap_layers(self._model, self._lora_modules, self._adapters)
        num_items = len(batch.items)
        if not items:
            return lambda _: (None, lambda tokens: [failed[number] for number in range(num_items)])
        with self._adapters.of(items, self.device) if self._adapters is not None else nullcontext():
            sample_items = self._launch_items(items, before)

        def sample(outputs_before: Sequence[ItemOutput]) -> Sampling:
            sampled, make_outputs = sample_items(outputs_before)

            def outputs(tokens: Sequence[SampledToken]) -> list[ItemOutput]:
                fine = iter(make_outputs(tokens))
                return [failed.get(number) or next(fine) for number in range(num_items)]

            return sampled, outputs

        return sample

    def _launch_items(self, items: list[BatchItem], before: LaunchedStep | None) -> SampleAfter:
        # Begun before the model if possible: the masks of grammars are then computed beside it, and one copy is saved.
        begun = self._begin_sampling(items, samples_after(items, [])) if are_samples_known(items) else None
        arrays = begun.step.arrays if begun is not None else []
        fed = FedTokens(items, before, self._pool.layout.tensor_parallel_size)
        prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
        pooled: dict[int, bytes] = {}
        if any(item.num_prompt_logprobs is not None or item.pooling is not None for item in items):
            rows, prompt_logprobs, pooled = self._run_with_head(items, fed)
            tensors = upload(arrays, self.device)
        else:
            rows, tensors = self._sampled_logits(items, fed, arrays)

        def sample(outputs_before: Sequence[ItemOutput]) -> Sampling:
            sampling, uploaded = begun, tensors
            if sampling is None:
                sampling = self._begin_sampling(items, samples_after(items, outputs_before))
                uploaded = upload(sampling.step.arrays, self.device)
            mask = sampling.masking.result() if sampling.masking is not None else None
            sampled = sampling.step.run(rows, uploaded, mask) if any(item.samples for item in items) else None
            return sampled, lambda tokens: outputs(tokens, mask)

        def outputs(sampled_tokens: Sequence[SampledToken], mask: StepMask | None) -> list[ItemOutput]:
            tokens = iter(sampled_tokens)
            made = [
                ItemOutput(
                    [next(tokens) for _ in item.samples], prompt_logprobs.get(number, []), pooled=pooled.get(number)
                )
                for number, item in enumerate(items)
            ]
            return with_outcomes(made, mask) if mask is not None and (mask.errors or mask.late) else made

        return sample

    def _begin_sampling(self, items: list[BatchItem], samples: list[Sample]) -> _BegunSampling:
        is_shared = any(sample.grammar is None for sample in samples) or not all(item.samples for item in items)
        masking = self._grammar_masks.start(samples, is_shared)
        positions = [item.start + len(item.token_ids) for item in items for _ in item.samples]
        return _BegunSampling(SamplingStep(samples, positions, self._vocab_size), masking)

    def _inputs(
        self, items: list[BatchItem], fed: FedTokens, arrays: Sequence[Array] = ()
    ) -> tuple[dict[str, Any], list[torch.Tensor]]:
        """Returns the model's inputs, and `arrays` on the device."""
        inputs: dict[str, Any] = {"use_cache": False}
        num_fed = len(fed.arrays)
        if self._uses_triton:
            index = StepIndex.of(items, self._pool.layout.block_size)
            flat, *tensors = upload([flat_on_host(index), *fed.arrays, *arrays], self.device)
            fed.put_into(flat, tensors[:num_fed])
            inputs |= self._inputs_of(StepTensors.of(flat, index))
            token_ids = inputs["input_ids"]
        else:
            tensors = upload([*fed.arrays, *arrays], self.device)
            inputs["tandem"] = self._make_attention(items)
            token_ids = torch.tensor([[token_id for item in items for token_id in item.token_ids]], device=self.device)
            fed.put_into(token_ids[0], tensors[:num_fed])
        if self._media_input is not None and any(item.media is not None for item in items):
            for name in ("input_ids", "position_ids"):
                inputs.pop(name, None)
            inputs |= self._media_input.inputs(items, token_ids)
        elif not self._uses_triton:
            inputs["input_ids"] = token_ids
            inputs["position_ids"] = torch.tensor([positions_of(items)], device=self.device)
        return inputs, tensors[num_fed:]

    def _inputs_of(self, step: StepTensors) -> dict[str, Any]:
        return {
            "input_ids": step.token_ids.long()[None],
            "position_ids": step.positions.long()[None],
            "tandem": TritonAttention(self._pool, step, self._row_counts is not None),
        }

    def _sampled_logits(
        self, items: list[BatchItem], fed: FedTokens, arrays: Sequence[Array]
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Returns logits [num_samples, vocab_size], and `arrays` on the device.

        Without a graph only sampled rows are computed, and once per item.
        """
        has_adapters = self._adapters is not None and self._adapters.parts  # the graphs were captured without them
        if self._graphs is not None and not has_adapters and all(item.media is None for item in items):
            index = StepIndex.of(items, self._pool.layout.block_size)
            if (shape := self._graphs.shape_for(index)) is not None:
                padded = index.padded(shape.num_tokens, shape.num_sequences)
                choice = [number for number, item in enumerate(items) for _ in item.samples]
                flat, chosen, *tensors = upload(
                    [flat_on_host(padded), np.array(choice, np.int64), *fed.arrays, *arrays], self.device
                )
                fed.put_into(flat, tensors[: len(fed.arrays)])
                tensors = tensors[len(fed.arrays) :]
                try:
                    return _select(self._graphs.run(shape, padded, flat), choice, chosen), tensors
                except NotCapturedError as problem:
                    self._leave_out(shape, problem)
        last_rows = itertools.accumulate(len(item.token_ids) for item in items)
        sampled = [(last - 1, len(item.samples)) for last, item in zip(last_rows, items, strict=True) if item.samples]
        # At least one row, because models do not support an empty selection.
        keep = np.array([row for row, _ in sampled] or [0], np.int64)
        choice = [number for number, (_, times) in enumerate(sampled) for _ in range(times)]
        inputs, (kept, chosen, *tensors) = self._inputs(items, fed, [keep, np.array(choice, np.int64), *arrays])
        logits: torch.Tensor = self._model(**inputs, logits_to_keep=kept).logits[0]
        return _select(logits, choice, chosen), tensors

    def _leave_out(self, shape: GraphShape, problem: NotCapturedError) -> None:
        """Runs steps of this shape without a graph from now on; all steps, if no graph could be captured before."""
        assert self._graphs is not None and problem.__cause__ is not None
        cause = problem.__cause__.__context__ or problem.__cause__  # torch raises its own error at a capture's end
        if self._graphs.captured:
            log.warning("no CUDA graph for %d tokens, which is slower: %s", shape.num_tokens, first_line(cause))
        else:  # e.g. mixtures of experts that synchronise with the host
            log.warning("steps run without CUDA graphs: %s", first_line(cause))
            self._graphs = None

    def _run_with_head(
        self, items: list[BatchItem], fed: FedTokens
    ) -> tuple[torch.Tensor, dict[int, list[TokenLogprobs]], dict[int, bytes]]:
        """Returns what `_sampled_logits` returns; by item number, prompt logprobs and pooled hidden states."""
        head = ModelHead(self._model, self._inputs(items, fed)[0])
        prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
        pooled: dict[int, bytes] = {}
        sampled_rows: list[int] = []
        first_row = 0
        for number, item in enumerate(items):
            if item.num_prompt_logprobs is not None:
                targets = torch.tensor(item.target_token_ids, dtype=torch.long, device=self.device)
                prompt_logprobs[number] = head.logprobs(first_row, targets, item.num_prompt_logprobs)
            if item.pooling is not None:
                pooled[number] = head.pooled(first_row, len(item.token_ids), item.pooling)
            first_row += len(item.token_ids)
            sampled_rows += [first_row - 1] * len(item.samples)
        # At least one row, because models do not support an empty selection.
        rows = head.logits(torch.tensor(sampled_rows or [0], device=self.device))
        return rows, prompt_logprobs, pooled

    def warm_up(self) -> None:
        """Captures the graphs that the worker's role needs, and runs each kind of step once.

        First calls are slow. All steps use block 0, which is unused.
        """
        for items in self._graphs.startup_steps() if self._graphs is not None else ():
            self.run(Batch(items))
            if self._graphs is None:  # the model cannot be captured
                break
        num_tokens = min(self._pool.layout.block_size, 16)
        self.run(Batch([BatchItem([0] * num_tokens, 0, [0])]))
        for params in (SamplingParams(temperature=0.0), SamplingParams(temperature=1.0, top_p=0.9, top_k=10)):
            self.run(Batch([BatchItem([0], num_tokens - 1, [0], [Sample(params)])]))

    def use_graphs(self, limits: GraphLimits, capture: Capture) -> None:
        """Runs steps from CUDA graphs. `warm_up` captures those that the worker's role needs."""
        block_size = self._pool.layout.block_size

        def run_model(step: StepTensors) -> torch.Tensor:
            inputs = self._inputs_of(step)
            logits: torch.Tensor = self._model(**inputs, use_cache=False, logits_to_keep=step.last_rows).logits[0]
            return logits

        most = largest_step_without_waits(self._model, self.device) if self.device.type == "cuda" else None
        if most == 0:
            log.warning("steps run without CUDA graphs: the products of the model's experts wait for the host")
            return
        if most is not None:
            limits = replace(limits, max_graph_tokens=most)
        max_blocks = -(-self._max_model_len // block_size)
        self._graphs = StepGraphs(run_model, limits, block_size, max_blocks, capture)


def _select(logits: torch.Tensor, choice: list[int], chosen: torch.Tensor) -> torch.Tensor:
    """Returns the rows of `logits` that `choice` names. chosen: the same, on the device."""
    return logits[: len(choice)] if choice == list(range(len(choice))) else logits.index_select(0, chosen)


def _attachment_error(item: BatchItem) -> ErrorInfo | None:
    if item.media is not None and item.media.error is not None:
        return item.media.error
    return item.adapter.error if item.adapter is not None else None


def with_outcomes(outputs: list[ItemOutput], mask: StepMask) -> list[ItemOutput]:
    """Notes in the outputs which grammars have failed or were late. Samples of one item share their grammar's state."""
    merged = []
    first = 0
    for output in outputs:
        if output.tokens and (first in mask.errors or first in mask.late):
            output = msgspec.structs.replace(output, error=mask.errors.get(first), is_late=first in mask.late)
        merged.append(output)
        first += len(output.tokens)
    return merged


def uses_triton(pool: KVPool, model_config: Any) -> bool:
    """Whether steps run with `engine.cuda.triton_attention.TritonAttention`: on a GPU where its check passes."""
    if pool.tensor.device.type != "cuda":
        return False
    windows = sorted({NO_WINDOW, getattr(model_config, "sliding_window", None) or NO_WINDOW})
    problem = triton_problem(pool, model_config.num_attention_heads, windows)
    if problem is not None:
        log.warning("using plain attention without CUDA graphs, which is slower; our kernel is not used: %s", problem)
    return problem is None


def attention_maker(pool: KVPool) -> Callable[[Sequence[BatchItem]], StepAttention]:
    """Returns the factory of each step's attention over this pool, where our GPU kernel is not used."""
    if pool.tensor.device.type == "cpu":
        # Imported here because they load a compiler, which GPU workers may lack.
        from tandem.engine.cpu.attention import CPUAttention
        from tandem.engine.cpu.compiler import DTYPES

        if pool.model_dtype in DTYPES:
            return lambda items: CPUAttention(pool, items)
        log.warning("using plain attention, which is slower: the CPU kernel does not support %s", pool.model_dtype)
    return lambda items: PlainAttention(pool, items)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether a smaller step may succeed."""
    return isinstance(error, torch.OutOfMemoryError)


def why_lost(error: BaseException, device: torch.device) -> str:
    """Returns why the device cannot be used any more by this process, or an empty string.

    After an illegal access, or when the GPU has fallen off the bus, every later call fails too, until the process ends.
    The first such error may carry the name of any library, so the device itself is asked.
    """
    if is_out_of_memory(error):
        return ""
    if isinstance(error, torch.AcceleratorError):
        return str(error).partition("\n")[0]
    if device.type == "cuda":
        try:
            torch.cuda.synchronize(device)
        except Exception as found:
            return str(found).partition("\n")[0]
    return ""
