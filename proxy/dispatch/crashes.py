"""Prompts that crash the workers that compute them: how they are identified, and refused for a while. Pure.

Every prompt that a crashed worker had not begun to decode may have been the cause, whether it was computed or only
queued. So the first death changes nothing, and the second makes a prompt a suspect, which is tried apart from all
other unproven prompts (`proxy.dispatch.trials`). A suspect whose worker crashes then is the cause. A prompt that
happens to be present at two unrelated deaths is retried like any other, only later.

A worker whose engine fails by an error names the attempts in the step that failed. Then only these are suspects, at
once, and a prompt that is the only one in two such steps is the cause: it costs two workers (`sequences_that_crashed`).
"""

from __future__ import annotations

from hashlib import sha256

import msgspec

from tandem.protocol.messages.sampling import SamplingParams
from tandem.proxy.text.prompt import Prompt
from tandem.runtime.errors import InvalidRequest

SUSPECT_DEATHS = 2
"""Deaths after which a prompt is tried apart from others."""
MAX_DEATHS = 3
"""Deaths after which a prompt is refused, if the last worker ran nothing else."""
MAX_SHARED_DEATHS = 5
"""Deaths after which a prompt is refused, if the last worker ran only streams that had decoded tokens beside it. One of
them may have been the cause, but not time and again in the short time of a trial."""
REFUSAL_S = 600.0
MAX_REFUSED_PROMPTS = 1024
"""Prompts that are remembered; beyond that the oldest is forgotten."""


class RequestCrashesWorkers(InvalidRequest):
    """Workers died whenever they computed this request. A 400, because clients retry a 500 or 503 by themselves."""

    code = "request_crashes_workers"

    def __init__(self) -> None:
        super().__init__(
            "Workers crashed each time they computed this request, so it is refused for "
            f"{REFUSAL_S / 60:.0f} minutes. Change the prompt or its parameters, and report it to the operator."
        )


class RefusedPrompts:
    """Prompts of one client with their sampling parameters, by hash. Times are in seconds of one clock.

    The client is part of `Prompt.cache_salt`: a prompt that is refused to one client is computed for another.
    """

    def __init__(self) -> None:
        self._until: dict[bytes, float] = {}  # in order

    def add(self, now: float, digest: bytes) -> None:
        """digest: see `prompt_digest`."""
        self._until.pop(digest, None)
        self._until[digest] = now + REFUSAL_S
        while len(self._until) > MAX_REFUSED_PROMPTS:
            del self._until[next(iter(self._until))]

    def check(self, now: float, prompt: Prompt, sampling: SamplingParams) -> None:
        """Raises RequestCrashesWorkers for a refused prompt."""
        while self._until and next(iter(self._until.values())) <= now:
            del self._until[next(iter(self._until))]
        if self._until and prompt_digest(prompt, sampling) in self._until:
            raise RequestCrashesWorkers


def prompt_digest(prompt: Prompt, sampling: SamplingParams) -> bytes:
    """Hashes the client and everything that a worker computes, except the seed. About a millisecond for a megabyte."""
    shape = msgspec.structs.replace(sampling, seed=0)
    media = [(item.digest, item.spans) for item in prompt.media]
    parts = msgspec.msgpack.encode(
        (prompt.token_ids, media, prompt.num_prompt_logprobs, shape, prompt.adapter, prompt.pooling, prompt.cache_salt)
    )
    return sha256(parts).digest()
