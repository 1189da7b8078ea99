"""Faults in what a sequence is sampled with, in what its client is told, and in the ends of steps that fail."""

from __future__ import annotations

from tests.simulation.mutation import DECODE, GENERATION, Mutation

SEQUENCE, PROMPT = "decode_worker/sequence.py", "prefill_worker/prompt.py"
RUNNING = "decode_worker/running.py"
MESSAGES, REQUEST = "proxy/dispatch/sequence.py", "proxy/api/generation_request.py"

SAMPLING = (
    Mutation(
        "siblings get each other's first tokens when one is cancelled",
        DECODE,
        "dict(zip(request.attempt_ids, first_token_ids, strict=True))",
        "dict(zip(prompt.sequences, first_token_ids))",
    ),
    Mutation(
        "min_tokens is counted anew after a migration",
        SEQUENCE,
        "num_generated = len(self.output_token_ids) + self.num_steps",
        "num_generated = len(self.output_token_ids) + self.num_steps - self.prompt.request.num_generated",
    ),
    Mutation(
        "a sequence runs on behind its stop string",
        GENERATION,
        "services.dispatcher.drop(sequence)  # the workers do not know of a stop string",
        "pass",
    ),
    Mutation(
        "siblings decode with one seed",
        SEQUENCE,
        "sampling = msgspec.structs.replace(request.sampling, seed=seed)",
        "sampling = request.sampling",
    ),
    Mutation(
        "penalties take what was generated for the prompt",
        SEQUENCE,
        "token_array(prompt.request.token_ids[: num_before * BYTES_PER_TOKEN])",
        "token_array(prompt.request.token_ids)",
    ),
    Mutation(
        "the history is lost at a migration",
        PROMPT,
        "output_token_ids = token_ids[num_before:] if sampling.needs_history else ()",
        "output_token_ids = ()",
    ),
    Mutation("the proxy drops the salt", GENERATION, "                cache_salt=request.cache_salt,\n", ""),
    Mutation(
        "the adapter is lost at a migration",
        MESSAGES,
        '"adapter": prompt.adapter',
        '"adapter": prompt.adapter if not generated else None',
    ),
    Mutation("siblings ask for one seed", REQUEST, "seed=(first + i) % 2**63", "seed=first"),
    Mutation(
        "usage counts tokens behind the end",
        GENERATION,
        "self.record.num_completion_tokens += len(delta.tokens)\n                if",
        "self.record.num_completion_tokens += len(taken.tokens)\n                if",
    ),
    Mutation(
        "an item's error is not reported",
        "prefill_worker/prefill_scheduler.py",
        "actions += self._end(prompt, output.error.to_error())\n                continue",
        "actions += self._end(prompt)\n                continue",
    ),
    Mutation(
        "sequences go on after running out of memory with copies missing",
        RUNNING,
        "if has_run:",
        "if True:",
    ),
    Mutation(
        "a stop string that is complete with the last of min_tokens ends the text",
        "proxy/dispatch/generation.py",
        "text, may_end=self._num_tokens > self._min_tokens)",
        "text, may_end=self._num_tokens >= self._min_tokens)",
    ),
    Mutation(
        "cached tokens are counted for the first prompt of a request only",
        GENERATION,
        "if text.index % self.request.n == 0:",
        "if text.index == 0:",
    ),
)
