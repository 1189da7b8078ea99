"""Answers that are full of markers of tool calls, from a model that writes nothing else if `logit_bias` says so."""

from __future__ import annotations

from pathlib import Path

import httpx

from tests.security.attacker import Attack, Attacker
from tests.support.cluster import MODEL
from tests.support.marker_model import make_marker_model

NUM_CHOICES = 8
NUM_TOKENS = 500
"""Of each choice. Its 8,000 markers took a second of the event loop when the work was quadratic."""


def marker_model(folder: Path, marker: str) -> Path:
    """Makes a model whose last token is many markers, and returns its folder."""
    model = folder / "model"
    model.mkdir()
    token_id = make_marker_model(model, marker)
    (folder / "token_id").write_text(str(token_id))
    return model


def marked_answers(attacker: Attacker) -> list[httpx.Response | None]:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
        "logit_bias": {(attacker.folder / "token_id").read_text(): 100},
        "ignore_eos": True,
        "max_tokens": NUM_TOKENS,
        "n": NUM_CHOICES,
    }
    return [attacker.send("/v1/chat/completions", body | {"stream": stream}) for stream in (False, True)]


MARKED_ATTACKS = [Attack(marked_answers)]
