"""Runs one step: prompt chunks and single tokens through the model, then the sampler."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from typing import Any

import msgspec
import torch

from tandem.engine.attention.step_index import StepIndex
from tandem.engine.attention_backends import attention_maker
from tandem.engine.batch import Batch, BatchItem, ItemOutput, Sample
from tandem.engine.cpu.heap import keep_freed_memory
from tandem.engine.cpu.packed_linear import pack_linears
from tandem.engine.cuda.attention import StepTensors, VarlenAttention
from tandem.engine.cuda.decode_graphs import Capture, DecodeGraphs, cuda_capture
from tandem.engine.cuda.triton_attention import TritonAttention
from tandem.engine.kv_pool import KVPool
from tandem.engine.loading.model_loader import LoadedModel
from tandem.engine.lora.layers import StepAdapters, wrap_layers
from tandem.engine.model_head import ModelHead
from tandem.engine.sampling.grammar_mask import GrammarMasks
from tandem.engine.sampling.sampler import sample
from tandem.engine.vision.media_input import MediaInput, positions_of
from tandem.protocol.messages.generation import SamplingParams, TokenLogprobs
from tandem.runtime.errors import ErrorInfo, InvalidRequest, first_line

log = logging.getLogger(__name__)


class ModelRunner:
    """Owns the model, on the engine thread."""

    def __init__(self, loaded: LoadedModel, pool: KVPool) -> None:
        self._model = loaded.model
        self._media_input = MediaInput(loaded.vision, loaded.model) if loaded.vision is not None else None
        self._pool = pool
        self.device = self._device = loaded.device
        self._wait_for_device = device_waiter(loaded.device)
        self._max_model_len = loaded.max_model_len
        # Sharded layers contain collectives; neither fusing nor graph capture supports those.
        self._is_whole = loaded.layout.tensor_parallel_size == 1
        if loaded.device.type == "cpu":
            # Imported here because it loads a compiler, which GPU workers may lack.
            from tandem.engine.cpu.fused_layers import fuse_layers

            keep_freed_memory()
            with torch.inference_mode():
                if self._is_whole:
                    fuse_layers(self._model)
                pack_linears(self._model)
        self._make_attention = attention_maker(pool, self._model.config.get_text_config(decoder=True))
        self._graphs: DecodeGraphs | None = None
        self._lora_modules = loaded.lora_modules
        self._adapters: StepAdapters | None = None  # from the first step with an adapter on
        self._grammar_masks = GrammarMasks()

    @torch.inference_mode()
    def run(self, batch: Batch) -> list[ItemOutput]:
        """Runs a step and returns one output per item, when the device is done.

        A step that samples nothing reads nothing back, and its blocks may be released and written by a peer at once.
        """
        outputs = self._run(batch)
        self._wait_for_device()
        return outputs

    def _run(self, batch: Batch) -> list[ItemOutput]:
        if batch.block_copies:
            sources, destinations = zip(*batch.block_copies, strict=True)
            self._pool.tensor[list(destinations)] = self._pool.tensor[list(sources)]
        if batch.encodes or any(item.media is not None or item.adapter is not None for item in batch.items):
            return self._run_with_attachments(batch)
        return self._run_items(batch.items)

    def _run_with_attachments(self, batch: Batch) -> list[ItemOutput]:
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
        if self._adapters is None:
            outputs = iter(self._run_items(items) if items else [])
        else:
            with self._adapters.of(items, self._device):
                outputs = iter(self._run_items(items) if items else [])
        return [failed.get(number) or next(outputs) for number in range(len(batch.items))]

    def _run_items(self, items: list[BatchItem]) -> list[ItemOutput]:
        samples = [s for item in items for s in item.samples]
        masking = self._grammar_masks.start(samples)  # runs beside the model
        prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
        pooled: dict[int, bytes] = {}
        if any(item.num_prompt_logprobs is not None or item.pooling is not None for item in items):
            rows, prompt_logprobs, pooled = self._run_with_head(items)
        else:
            rows = self._sampled_logits(items)
        positions = [item.start + len(item.token_ids) for item in items for _ in item.samples]
        mask = masking.result() if masking is not None else None
        tokens = iter(sample(rows, samples, positions, mask) if samples else [])
        outputs = [
            ItemOutput([next(tokens) for _ in item.samples], prompt_logprobs.get(number, []), pooled=pooled.get(number))
            for number, item in enumerate(items)
        ]
        return with_errors(outputs, mask.errors) if mask is not None and mask.errors else outputs

    def _inputs(self, items: list[BatchItem]) -> dict[str, Any]:
        if self._media_input is not None and any(item.media is not None for item in items):
            inputs = self._media_input.inputs(items)
        else:
            token_ids = [token_id for item in items for token_id in item.token_ids]
            inputs = {
                "input_ids": torch.tensor([token_ids], device=self._device),
                "position_ids": torch.tensor([positions_of(items)], device=self._device),
            }
        return inputs | {"use_cache": False, "tandem": self._make_attention(items)}

    def _sampled_logits(self, items: list[BatchItem]) -> torch.Tensor:
        """Returns [num_samples, vocab_size]. Only sampled rows are computed, and once per item."""
        has_adapters = self._adapters is not None and self._adapters.parts  # the graphs were captured without them
        if self._graphs is not None and not has_adapters and all(len(item.samples) == 1 for item in items):
            captured = self._graphs.run(StepIndex.of(items, self._pool.layout.block_size))
            if captured is not None:
                return captured
        last_rows = list(itertools.accumulate(len(item.token_ids) for item in items))
        sampled = [(last - 1, len(item.samples)) for last, item in zip(last_rows, items, strict=True) if item.samples]
        # At least one row, because models do not support an empty selection.
        keep = torch.tensor([row for row, _ in sampled] or [0], device=self._device)
        logits: torch.Tensor = self._model(**self._inputs(items), logits_to_keep=keep).logits[0]
        if len(sampled) == sum(num for _, num in sampled):
            return logits
        return logits.repeat_interleave(torch.tensor([num for _, num in sampled], device=self._device), 0)

    def _run_with_head(
        self, items: list[BatchItem]
    ) -> tuple[torch.Tensor, dict[int, list[TokenLogprobs]], dict[int, bytes]]:
        """Returns what `_sampled_logits` returns; by item number, prompt logprobs and pooled hidden states."""
        head = ModelHead(self._model, self._inputs(items))
        prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
        pooled: dict[int, bytes] = {}
        sampled_rows: list[int] = []
        first_row = 0
        for number, item in enumerate(items):
            if item.num_prompt_logprobs is not None:
                targets = torch.tensor(item.target_token_ids, dtype=torch.long, device=self._device)
                prompt_logprobs[number] = head.logprobs(first_row, targets, item.num_prompt_logprobs)
            if item.pooling is not None:
                pooled[number] = head.pooled(first_row, len(item.token_ids), item.pooling)
            first_row += len(item.token_ids)
            sampled_rows += [first_row - 1] * len(item.samples)
        # At least one row, because models do not support an empty selection.
        rows = head.logits(torch.tensor(sampled_rows or [0], device=self._device))
        return rows, prompt_logprobs, pooled

    def warm_up(self) -> None:
        """Runs each kind of step once, on the unused block 0, because first calls are slow."""
        num_tokens = min(self._pool.layout.block_size, 16)
        self.run(Batch([BatchItem([0] * num_tokens, 0, [0])]))
        for params in (SamplingParams(temperature=0.0), SamplingParams(temperature=1.0, top_p=0.9, top_k=10)):
            self.run(Batch([BatchItem([0], num_tokens - 1, [0], [Sample(params)])]))
        if self._device.type == "cuda" and self._is_whole:
            self._capture_graphs(cuda_capture())

    def _capture_graphs(self, capture: Capture) -> None:
        """Captures graphs for decode steps, if the model supports it."""
        example = self._make_attention([BatchItem([0], 0, [0])])
        if not isinstance(example, TritonAttention | VarlenAttention):
            return

        def run_model(step: StepTensors) -> torch.Tensor:
            logits: torch.Tensor = self._model(
                input_ids=step.token_ids.long()[None],
                position_ids=step.positions.long()[None],
                use_cache=False,
                logits_to_keep=0,  # all tokens
                tandem=example.at(step),
            ).logits[0]
            return logits

        block_size, max_len = self._pool.layout.block_size, self._max_model_len
        graphs = DecodeGraphs(run_model, -(-max_len // block_size), max_len, self._device, capture)
        try:
            with torch.inference_mode():
                graphs.capture_all(StepIndex.of([BatchItem([0], 0, [0])], block_size))
        except Exception as problem:  # e.g. mixtures of experts that synchronise with the host
            log.warning("decode runs without CUDA graphs: %s", first_line(problem))
            return
        self._graphs = graphs


def device_waiter(device: torch.device) -> Callable[[], None]:
    """Returns a function that blocks, without spinning, until the work queued on the device is done."""
    if device.type != "cuda":
        return lambda: None

    def wait() -> None:
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        event.synchronize()

    return wait


def _attachment_error(item: BatchItem) -> ErrorInfo | None:
    if item.media is not None and item.media.error is not None:
        return item.media.error
    return item.adapter.error if item.adapter is not None else None


def with_errors(outputs: list[ItemOutput], errors: dict[int, ErrorInfo]) -> list[ItemOutput]:
    """Attaches errors to outputs. errors: by sample index over all items; samples of one item share their grammar."""
    merged = []
    first = 0
    for output in outputs:
        error = errors.get(first) if output.tokens else None
        merged.append(output if error is None else msgspec.structs.replace(output, error=error))
        first += len(output.tokens)
    return merged
