"""Lets a request begin in vLLM's model runner as one that was preempted after some tokens goes on.

A sequence that comes from another worker has generated tokens. vLLM's first model runner, which CPUs use, takes all
tokens of a new request as its prompt: penalties, minimum lengths, bad words and seeds would start again. Here they go
on: the tokens become output, and the request's generator takes as many draws as were made for them. The second model
runner does this by itself: it is given the tokens, and its random numbers follow from seed and position.
"""

from __future__ import annotations

from typing import Any

import torch

from tandem.vllm_worker.extensions.named_logprobs import keep_likeliest_tokens
from tandem.vllm_worker.extensions.prompt_logits import allow_prompt_logits

OUTPUT = "tandem_output"
"""Key of the generated tokens in `SamplingParams.extra_args`."""


class _RewindingGenerator(torch.Generator):
    """A CPU generator that forgets draws for unfinished prompts, as vLLM asks of GPUs' by an offset.

    A step draws for each of its requests, also for one of whose prompt it computes a chunk only.
    """

    def remember(self) -> None:
        self._start = self.get_state()

    def get_offset(self) -> int:
        return 0

    def set_offset(self, offset: int) -> torch.Generator:
        return self.set_state(self._start)


class ResumedSequences:
    """Mixed into vLLM's worker class."""

    model_runner: Any

    def keep_generated_tokens(self) -> None:
        """Call once, when the worker is ready."""
        batch = getattr(self.model_runner, "input_batch", None)
        if batch is None or not hasattr(batch, "generators"):
            return  # the second model runner
        add_request = batch.add_request

        def add(request: Any) -> int:
            params = request.sampling_params
            tokens = (params.extra_args or {}).get(OUTPUT, ()) if params is not None else ()
            if not request.output_token_ids:  # otherwise it was preempted here
                request.output_token_ids.extend(tokens)
                if request.generator is not None:
                    request.generator = _generator(params.seed, len(tokens), batch.vocab_size, batch.device)
            return int(add_request(request))

        batch.add_request = add
        keep_likeliest_tokens(self.model_runner)
        if batch.device.type == "cpu":
            allow_prompt_logits()


def _generator(seed: int, num_draws: int, vocab_size: int, device: torch.device) -> torch.Generator:
    """Returns a generator from which `num_draws` tokens have been drawn, as `vllm.v1.sample.ops` draws them."""
    if device.type == "cpu":  # a seed for the noise of each token
        rewinding = _RewindingGenerator()
        rewinding.manual_seed(seed)
        for _ in range(num_draws):
            torch.randint(0, 2**31, (1,), generator=rewinding)
        rewinding.remember()
        return rewinding
    generator = torch.Generator(device)
    generator.manual_seed(seed)
    noise = torch.empty(vocab_size, device=device)
    for _ in range(num_draws):
        noise.exponential_(generator=generator)
    return generator
