"""Computes each sequence by itself in this process: a cluster's answers must equal that, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from tandem.deploy.commands.replay import Difference, Token, computed_alone, first_difference
from tandem.engine.engine_config import EngineConfig
from tandem.protocol.messages.sampling import SamplingParams, StopConditions
from tandem.proxy.records.record import Record, as_float32
from tandem.worker.lone_engine import LoneEngine


def exact_engine(model: Path, dtype: str = "bfloat16", **options: Any) -> LoneEngine:
    """Returns an engine of one thread; the cluster needs `--threads-per-worker 1`. Raises ConfigError for a model whose
    answers are not exact."""
    settings = {"model": str(model), "dtype": dtype, "device": "cpu", "exact": True, "kv_cache_bytes": 64 << 20}
    return LoneEngine(msgspec.convert(settings | options, EngineConfig))


def tokens_alone(engine: LoneEngine, prompt: list[int], sampling: SamplingParams, num_tokens: int) -> list[Token]:
    """Returns the first tokens of a sequence, whether or not one of them would end it."""
    sampling = msgspec.structs.replace(sampling, logprobs=0)
    return [
        Token(token.token_id, as_float32(token.logprobs.logprob if token.logprobs is not None else None))
        for token in engine.tokens(prompt, sampling, StopConditions(num_tokens), num_tokens)
    ]


def differences(engine: LoneEngine, record: Record) -> list[Difference]:
    """Returns the first token of each sequence that is another one when it is computed alone, or has other bits."""
    computed = computed_alone(record, engine)
    found = (first_difference(number, record, computed[number]) for number in range(len(record.sequences)))
    return [each for each in found if each is not None]
