"""Answers of models whose KV vLLM lays out in different ways stay the same when it moves to another worker.

`python -m tests.integration.vllm.test_families` tries all families and prints the table of docs/vllm.md.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tandem.protocol.messages.membership import WorkerInfo
from tests.faults.streams import Stream
from tests.support.cluster import MODEL, Cluster
from tests.support.vllm_clusters import START_TIMEOUT_S, cluster_arguments, complete
from tests.support.vllm_families import BLOCK, FAMILIES, WINDOW, checked, make_family

pytestmark = [pytest.mark.timeout(900), pytest.mark.extended]

IN_CI = ("gemma3_text", "falcon_h1", "deepseek_v2")
LENGTHS = (3, WINDOW - 1, WINDOW + 1, 300)
APART = ("--prefill", "1", "--decode", "1", "--decode-prefill-threshold", "0")


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=() if name in IN_CI else pytest.mark.exhaustive, id=name) for name in FAMILIES],
)
def test_a_prompt_goes_on_with_blocks_that_another_request_computed(family: str, tmp_path: Path) -> None:
    """Without cached blocks, with those of its first half, and with all but the last ones."""
    found = checked(family, tmp_path)
    assert not found["immovable"] and found["all_free"]
    for case in found["cases"]:
        assert len(case["alone"]) > BLOCK
        assert case["moved"] == case["alone"], (case["length"], case["num_before"], found["groups"])


def is_replaced(cluster: Cluster, old: WorkerInfo) -> bool:
    epochs = {report.worker.worker_id: report.worker.epoch for report in cluster.status().workers}
    return epochs.get(old.worker_id, old.epoch) != old.epoch and len(cluster.ready_pairs()) == 1


@pytest.mark.parametrize("family", ["mistral", pytest.param("gemma3_text", marks=pytest.mark.exhaustive)])
def test_workers_apart_answer_as_one_does(family: str, tmp_path: Path) -> None:
    """All layers of Mistral have windows: blocks that have left them are neither asked for nor shipped."""
    model = make_family(family, tmp_path)
    settings = ("--model", str(model), "--served-model-name", MODEL, "--kv-cache-gib", "0.1")
    bodies = [
        {"model": MODEL, "prompt": [5 + (number * 7) % 900 for number in range(length)], "temperature": 0,
         "max_tokens": 2 * BLOCK, "ignore_eos": True, "return_token_ids": True}
        for length in LENGTHS
    ]  # fmt: skip
    with Cluster(*cluster_arguments(), *settings, "--workers", "1", start_timeout_s=START_TIMEOUT_S) as cluster:
        expected = [complete(cluster, body) for body in bodies]
    with Cluster(*cluster_arguments(), *settings, *APART, start_timeout_s=START_TIMEOUT_S) as cluster:
        assert [complete(cluster, body) for body in bodies] == expected
        assert [complete(cluster, body) for body in bodies] == expected, "with cached prefixes"
        assert sum(each.load.num_transferred_bytes for each in cluster.status().workers)
        for killed in ("decode-0", "prefill-0"):
            long = Stream(cluster, {**bodies[-1], "max_tokens": 400})
            cluster.wait_for(lambda long=long: len(long.token_ids) > 20)
            old = cluster.worker(killed).worker
            os.kill(old.pid, signal.SIGKILL)
            assert long.wait(120.0) and long.outcome == "length"
            assert long.token_ids[: 2 * BLOCK] == expected[-1][0], killed
            cluster.wait_for(lambda old=old: is_replaced(cluster, old), START_TIMEOUT_S)
        assert [complete(cluster, body) for body in bodies] == expected, "after both were killed"
        cluster.wait_for(cluster.all_blocks_free)


def row(name: str, found: dict[str, Any]) -> str:
    """Returns a line of the table."""
    equal = sum(case["moved"] == case["alone"] for case in found["cases"])
    moves = found["immovable"] or f"{equal} of {len(found['cases'])}"
    return f"| `{name}` | {FAMILIES[name].kind} | {found['groups']} | {moves} |"


if __name__ == "__main__":
    print("| family | layers | groups of blocks | moved answers equal |\n| --- | --- | --- | --- |")
    for each in sys.argv[1:] or FAMILIES:
        with tempfile.TemporaryDirectory() as scratch:
            print(row(each, checked(each, Path(scratch))), flush=True)
