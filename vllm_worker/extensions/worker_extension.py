"""What Tandem adds to vLLM's worker class, of which every rank has an object."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import pad
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

from tandem.vllm_worker.extensions.kv_ranks import KVRank
from tandem.vllm_worker.versions import draws_seeds_on_cpu

EXTENSION = "tandem.vllm_worker.extensions.worker_extension.WorkerExtension"
"""For `ParallelConfig.worker_extension_cls`."""

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
    """Lets a request begin in vLLM's model runner as one that was preempted after some tokens goes on.

    A sequence that comes from another worker has generated tokens. vLLM's first model runner, which CPUs use, takes all
    tokens of a new request as its prompt: penalties, minimum lengths, bad words and seeds would start again. Here they
    go on: the tokens become output, and the request's generator takes as many draws as were made for them. The second
    model runner does this by itself: it is given the tokens, and its random numbers follow from seed and position.
    """

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
    on_cpu = device.type == "cpu"
    generator = _RewindingGenerator() if on_cpu else torch.Generator(device)
    generator.manual_seed(seed)
    draws_seeds, noise = on_cpu and draws_seeds_on_cpu(), torch.empty(vocab_size, device=device)
    for _ in range(num_draws):
        if draws_seeds:
            torch.randint(0, 2**31, (1,), generator=generator)
        else:
            noise.exponential_(generator=generator)
    if isinstance(generator, _RewindingGenerator):
        generator.remember()
    return generator


def keep_likeliest_tokens(runner: Any) -> None:
    """Lets requests that name the tokens of their logprobs share steps with requests that want the most likely ones.

    vLLM's first model runner, which CPUs use, reports for all sequences of a step as for those that name tokens, if
    there are any: the others would get no alternatives, and a beam search beside them other beams. The second model
    runner keeps them apart by itself. runner: vLLM's first. Call once.
    """
    sampler, batch = runner.sampler, runner.input_batch
    gather_named = sampler.gather_specific_token_logprobs

    def gather(logprobs: torch.Tensor, named: dict[int, list[int]], sampled: torch.Tensor) -> Any:
        found, num_top = gather_named(logprobs, named, sampled), batch.max_num_logprobs
        if num_top is None or found is None:
            return found
        likeliest = sampler.gather_logprobs(logprobs, num_top, token_ids=sampled)
        names_tokens = torch.zeros(len(logprobs), 1, dtype=torch.bool, device=logprobs.device)
        names_tokens[list(named)] = True
        width = max(found.logprobs.shape[1], 1 + num_top)

        def chosen(one: torch.Tensor, other: torch.Tensor, padding: float) -> torch.Tensor:
            one, other = (pad(each, (0, width - each.shape[1]), value=padding) for each in (one, other))
            return torch.where(names_tokens, one, other)

        return found._replace(
            logprob_token_ids=chosen(found.logprob_token_ids, likeliest.logprob_token_ids, 0),
            logprobs=chosen(found.logprobs, likeliest.logprobs, float("-inf")),
        )

    sampler.gather_specific_token_logprobs = gather


ROWS_PER_SLICE = 256
"""Tokens of a prompt whose logits are in memory at the same time."""


class SlicedPromptLogits:
    """Bounds the memory of prompts' log-probabilities.

    vLLM's first model runner computes the logits of a whole chunk of a prompt at once, and several arrays of that
    size from them; the second takes 1,024 tokens at a time. With a vocabulary of 150,000 a token has 0.6 MB in each.
    """

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
    """Lets prompts have log-probabilities on CPUs where the engine takes adapters. Call once in such a process.

    vLLM's first model runner computes the logits of a prompt's tokens with the adapters of the step's sequences,
    one for each. Their number is another than that of the tokens, which ends the engine. Only adapters of the output
    layer have a part in logits; the other tensors are zero.
    """
    add_logits = PunicaWrapperCPU.add_lora_logits

    def add(wrapper: Any, y: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *rest: Any) -> None:
        num_rows = x.numel() // x.shape[-1]
        if num_rows == len(wrapper.sampler_indices) or b.any():
            add_logits(wrapper, y, x, a, b, *rest)

    PunicaWrapperCPU.add_lora_logits = add


class WorkerExtension(ResumedSequences, SlicedPromptLogits, KVRank):
    """vLLM mixes it in. Its methods are called by `collective_rpc`."""
