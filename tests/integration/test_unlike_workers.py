"""A worker that computes otherwise than the rest of its cluster: it serves with a warning, or apart with --exact."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import msgspec
import pytest

from tandem.deploy.processes.runtime_dir import runtime_dir
from tandem.worker.tandem_worker_config import TandemWorkerConfig
from tests.support.cluster import MODEL, OLDER_CPU, Cluster, joined, refused_start
from tests.support.noise_model import ensure_noise_model
from tests.support.ports import free_port

pytestmark = pytest.mark.timeout(600)

SMALL = ("--threads-per-worker", "1", "--kv-cache-gib", "0.05")
PROMPT = [11 + number for number in range(150)]
FIELD = r"instruction_set|environment"  # on a CPU without AVX-512 only the environment differs


@contextmanager
def unlike_worker(cluster: Cluster, log: Path) -> Iterator[None]:
    """Adds decode-9, whose libraries may not use AVX-512. It has a pair with prefill-0 then, or was refused one."""
    folder = runtime_dir(cluster.port)
    config = msgspec.json.decode((folder / "decode-0.json").read_bytes(), type=TandemWorkerConfig)
    other = msgspec.structs.replace(config, worker_id="decode-9", endpoint=f"ipc://{folder}/decode-9.sock")
    file = folder / "decode-9.json"
    file.write_bytes(msgspec.json.encode(other))
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "tandem.worker", str(file)], stderr=output, env={**os.environ, **OLDER_CPU}
        )
    try:
        cluster.wait_for(lambda: pair_state(cluster) in ("ready", "refused"), 200)
        yield
    finally:
        process.terminate()
        process.wait()
        file.unlink()


def pair_state(cluster: Cluster) -> str:
    pairs = [pair for report in cluster.status().workers for pair in report.pairs]
    return next((pair.state for pair in pairs if pair.decode_worker_id == "decode-9"), "")


def shown_status(cluster: Cluster, *flags: str) -> str:
    return cluster.run("status", *flags, COLUMNS="400").stdout


def test_without_the_flag_unlike_workers_pair_and_the_status_and_the_log_say_so(tmp_path: Path) -> None:
    with Cluster(*SMALL) as cluster:
        [ours] = cluster.status().numerics
        assert f"exact: yes (numerics {ours})" in shown_status(cluster)
        with unlike_worker(cluster, tmp_path / "log"):
            assert pair_state(cluster) == "ready"
            shown = shown_status(cluster)
            assert "exact: no: workers compute differently: " in shown
            assert any(f"{field} is " in shown for field in FIELD.split("|"))
            assert "on decode-0 and " in shown and " on decode-9; --exact keeps" in shown
            report = json.loads(shown_status(cluster, "--json"))[0]
            assert report["exact"] is False and len(report["numerics"]) == 2
            assert len(cluster.token_ids(PROMPT, 4)) == 4
        log = (tmp_path / "log").read_text()
        assert "answers depend on where they are computed: prefill-0 has" in log
        assert "answers are exact (numerics " in log


def test_with_the_flag_an_answer_waits_for_its_own_kind_of_worker(tmp_path: Path) -> None:
    with Cluster(*SMALL, "--exact") as cluster:
        [whole] = cluster.complete(prompt=PROMPT, max_tokens=120, logprobs=1)["choices"]
        with unlike_worker(cluster, tmp_path / "log"):
            assert pair_state(cluster) == "refused"
            shown = shown_status(cluster)
            assert "exact: yes, on 2 kinds of workers, each of which continues its own answers only: " in shown
            assert "with --exact, workers must compute alike, but their" in shown
            assert "decode-9 gets " in cluster.status().exactness, "it has no prefill worker of its kind"
            decode = cluster.worker("decode-0").worker
            body = {
                "model": MODEL, "prompt": PROMPT, "max_tokens": 120, "temperature": 0, "ignore_eos": True,
                "return_token_ids": True, "stream": True, "logprobs": 1,
            }  # fmt: skip
            found: list[int] = []
            logprobs: list[float] = []
            with httpx.stream("POST", f"{cluster.url}/v1/completions", json=body, timeout=200) as answer:
                for line in answer.iter_lines():
                    if not line.startswith("data: {"):
                        continue
                    [choice] = json.loads(line[6:])["choices"]
                    found += choice["token_ids"]
                    logprobs += choice["logprobs"]["token_logprobs"]
                    if len(found) > 3 and decode.pid:
                        os.kill(decode.pid, signal.SIGKILL)
                        decode = msgspec.structs.replace(decode, pid=0)
            assert found == whole["token_ids"]
            assert logprobs == whole["logprobs"]["token_logprobs"]
            assert cluster.num_migrations() >= 1
            assert cluster.worker("decode-9").load.num_finished == 0


def test_with_the_flag_a_setting_that_is_not_exact_ends_the_start_with_the_reason() -> None:
    error = refused_start("--model", str(ensure_noise_model()), "--dtype", "float16", "--exact", *SMALL)
    assert "--exact: answers of " in error and "float16" in error and error.endswith("leave out --exact")


def test_workers_that_join_an_exact_cluster_may_be_unlike_it_if_they_need_no_pair_with_it() -> None:
    port = str(free_port())
    address = ("--cluster-host", "127.0.0.1", "--insecure-network")
    with Cluster(*SMALL, *address, "--cluster-port", port, "--exact", "--device", "cpu") as cluster:
        model = ("--model", str(ensure_noise_model()), "--name", "older", "--device", "cpu", "--exact")
        join = ("any", "--join", f"tcp://127.0.0.1:{port}", *address, *model, *SMALL)
        with joined(join, OLDER_CPU):
            cluster.wait_for(lambda: cluster.status().exactness.startswith("yes, on 2 kinds of workers"), 200)

            numbers = itertools.count(20)

            def serves() -> bool:
                with ThreadPoolExecutor(4) as threads:  # of prompts that no worker has seen
                    prompts = [[next(numbers), *PROMPT] for _ in range(4)]
                    assert all(len(ids) == 4 for ids in threads.map(lambda each: cluster.token_ids(each, 4), prompts))
                return cluster.worker("worker-0-older").load.num_finished > 0

            cluster.wait_for(serves, 120)
            assert cluster.worker("worker-0-older").load.num_received == 0, "no KV comes from the other kind"
