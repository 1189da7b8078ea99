"""Bounds the memory of prompts' log-probabilities, and lets prompts have them on CPUs where the engine takes adapters.

vLLM 0.32's first model runner computes the logits of a whole chunk of a prompt at once, and several arrays of that size
from them; the second takes 1,024 tokens at a time. With a vocabulary of 150,000 a token has 0.6 MB in each array.

It also computes the logits of a prompt's tokens with the adapters of the step's sequences, one for each. Their number
is another than that of the tokens, which ends the engine. Only adapters of the output layer have a part in logits; the
other tensors are zero.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

ROWS_PER_SLICE = 256
"""Tokens of a prompt whose logits are in memory at the same time."""


class SlicedPromptLogits:
    """Mixed into vLLM's worker class."""

    model_runner: Any

    def slice_prompt_logits(self) -> None:
        """Call once, when the worker is ready."""
        runner = self.model_runner
        if not hasattr(runner, "_get_prompt_logprobs_dict"):  # the second model runner
            from vllm.v1.worker.gpu.sample import prompt_logprob

            assert prompt_logprob.CHUNK_SIZE >= ROWS_PER_SLICE
            prompt_logprob.CHUNK_SIZE = ROWS_PER_SLICE
            return
        of_chunk = runner._get_prompt_logprobs_dict

        def of_slices(hidden_states: torch.Tensor, num_scheduled_tokens: dict[str, int]) -> dict[str, Any]:
            """Pretends that a chunk is several, one after another. A prompt's result is in that of its last one."""
            wanted = {each: num_scheduled_tokens.get(each, 0) for each in runner.num_prompt_logprobs}
            found: dict[str, Any] = {}
            for start in range(0, max(wanted.values(), default=0), ROWS_PER_SLICE):
                sliced = {each: min(ROWS_PER_SLICE, num - start) for each, num in wanted.items() if num > start}
                requests = [runner.requests[each] for each in sliced]
                for request in requests:
                    request.num_computed_tokens += start
                try:
                    found |= of_chunk(hidden_states[start:], sliced)
                finally:
                    for request in requests:
                        request.num_computed_tokens -= start
            return found

        runner._get_prompt_logprobs_dict = of_slices


def allow_prompt_logits() -> None:
    """Call once in a process whose engine computes on a CPU."""
    add_logits = PunicaWrapperCPU.add_lora_logits

    def add(wrapper: Any, y: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *rest: Any) -> None:
        num_rows = x.numel() // x.shape[-1]
        if num_rows == len(wrapper.sampler_indices) or b.any():
            add_logits(wrapper, y, x, a, b, *rest)

    PunicaWrapperCPU.add_lora_logits = add
