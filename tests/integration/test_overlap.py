"""A real cluster whose workers overlap steps, as on a GPU: the same answers, and every block is free at the end.

There is no GPU here: a `sitecustomize` of the workers lets them overlap on a CPU.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.cluster import MODEL, Cluster

OVERLAP = """
import sys
if "tandem.worker.preload" in sys.orig_argv:
    import os
    from pathlib import Path
    from tandem.engine.model_runner import ModelRunner
    from tandem.worker import engine_loading

    launch = ModelRunner.launch

    def watched(self, batch, before=None):
        if any(item.follows is not None for item in batch.items):
            (Path({folder!r}) / f"overlapped-{{os.getpid()}}").touch()
        return launch(self, batch, before)

    ModelRunner.launch = watched
    engine_loading.may_overlap = lambda device_type: True
"""
BODIES: list[dict[str, Any]] = [
    {"max_tokens": 40, "temperature": 0},
    {"max_tokens": 25, "temperature": 0.8, "top_p": 0.9, "seed": 1, "n": 2},
    {"max_tokens": 30, "temperature": 1.0, "seed": 2, "frequency_penalty": 0.5},
    {"max_tokens": 60, "temperature": 1.0, "seed": 3, "stop": ["e"]},
    {"max_tokens": 20, "temperature": 0, "logprobs": 2},
    {"max_tokens": 40, "temperature": 1.0, "seed": 4, "structured_outputs": {"regex": "[ab]{5,20}c"}},
    {"max_tokens": 1, "temperature": 0},
]


def answers(cluster: Cluster) -> list[list[tuple[str, str]]]:
    """All requests at once, each for three prompts."""

    def ask(number: int) -> list[tuple[str, str]]:
        body = {"model": MODEL, "prompt": list(range(number, number + 40 + number)), **BODIES[number % len(BODIES)]}
        response = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=120)
        assert response.status_code == 200, response.text
        return [(choice["text"], choice["finish_reason"]) for choice in response.json()["choices"]]

    with ThreadPoolExecutor(18) as pool:
        return list(pool.map(ask, range(3, 21)))


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "flags",
    [
        ("--workers", "2"),
        ("--prefill", "1", "--decode", "1", "--decode-tensor-parallel-size", "2", "--threads-per-worker", "1"),
    ],
    ids=["elastic", "ranks"],
)
def test_overlapped_steps_give_the_same_answers(
    flags: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Cluster(*flags, "--dtype", "float32") as cluster:
        expected = answers(cluster)
    (tmp_path / "sitecustomize.py").write_text(OVERLAP.format(folder=str(tmp_path)))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    with Cluster(*flags, "--dtype", "float32") as cluster:
        assert answers(cluster) == expected
        cluster.wait_for(cluster.all_blocks_free)
    assert list(tmp_path.glob("overlapped-*")), "no step was scheduled ahead"
