"""The steps of a check tell a cluster that computes right from those that do not, here doubles of clusters."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from tandem.deploy.cluster_config import load_config
from tandem.deploy.engine_check.answers import CheckedAnswer
from tandem.deploy.engine_check.check import (
    LONG_TOKENS,
    NUM_PROMPTS,
    CheckResults,
    check_kill,
    check_parity,
    environment_of_workers,
    expected_answers,
    measure_rate,
    note_skipped,
)
from tandem.deploy.engine_check.checked_cluster import CheckFailed, role_of
from tandem.deploy.processes.engine_python import vllm_environment
from tandem.protocol.messages.membership import (
    PairStatus,
    PairTraffic,
    Role,
    StatusReport,
    WorkerInfo,
    WorkerLoad,
    WorkerReport,
)
from tests.support.async_tests import in_no_time

BLOCK, BLOCK_BYTES = 16, 1000


class DoubleOfCluster:
    """Answers each prompt with tokens that follow from it. The other fields are faults."""

    def __init__(self) -> None:
        self.prompts: list[list[int]] = []
        self.num_received = self.num_moved_bytes = self.num_corrupt = self.num_migrated = 0
        self.num_compared = 1
        self.epoch = 1
        self.wrong_after: int | None = None
        self.hands_over = True
        self.ends_before_kill = False
        self.hangs_after_kill = False

    async def tokenize(self, text: str) -> list[int]:
        return list(range(100))

    async def complete(
        self, prompt: list[int], max_tokens: int, on_token: Callable[[int], None] = lambda number: None
    ) -> CheckedAnswer:
        self.prompts.append(prompt)
        epoch, answer = self.epoch, CheckedAnswer()
        for number in range(max_tokens):
            token = (sum(prompt) + number) % 50
            if self.wrong_after is not None and number >= self.wrong_after and self.epoch > 1:
                token += 1
            answer.token_ids.append(token)
            answer.top.append({token: -0.1, 77: -5.0})
            on_token(number + 1)
            if not self.ends_before_kill:
                await asyncio.sleep(0.01)
            if epoch < self.epoch and self.hangs_after_kill:
                await asyncio.Event().wait()
        if self.hands_over:
            self.num_received += 1
            self.num_moved_bytes += len(prompt) * BLOCK_BYTES
        return answer

    async def settled_report(self) -> StatusReport:
        def worker(name: str, role: Role, load: WorkerLoad, *pairs: PairStatus) -> WorkerReport:
            info = WorkerInfo(name, f"{name}-{self.epoch}", role, "ipc://x", 1)
            return WorkerReport(info, load, list(pairs), 0.0, max_model_len=1000, block_size=BLOCK)

        traffic = [PairTraffic("decode-0", self.num_moved_bytes, 1, self.num_moved_bytes / 1e9)]
        pair = PairStatus("decode-0", "d", "ready" if self.hands_over else "refused", "ipc", "layouts differ")
        compared = WorkerLoad(
            num_blocks=64,
            num_received=self.num_received,
            num_compared_blocks=self.num_compared,
            num_corrupt_blocks=self.num_corrupt,
        )
        workers = [
            worker("prefill-0", "prefill", WorkerLoad(num_blocks=64, traffic=traffic), pair),
            worker("decode-0", "decode", compared),
        ]
        return StatusReport("proxy-0", "checked", True, 0, workers)

    async def worker(self, role: Role) -> WorkerReport:
        return role_of(await self.settled_report(), role)

    async def num_migrations(self) -> int:
        return self.num_migrated

    def kill(self, victim: WorkerReport) -> None:
        self.epoch += 1
        self.num_migrated += not self.ends_before_kill

    async def until_replaced(self, victim: WorkerReport) -> None:
        assert victim.worker.epoch.endswith(f"-{self.epoch - 1}")


async def expected(cluster: DoubleOfCluster) -> Any:
    return await expected_answers(cluster, await cluster.worker("decode"), 1.0)  # type: ignore[arg-type]


@in_no_time
async def test_prompts_end_around_the_boundaries_of_blocks_and_share_no_block() -> None:
    found = await expected(DoubleOfCluster())
    assert [len(prompt) for prompt, _ in found.short] == [3, 15, 16, 17, 31, 32, 33, 47, 48, 49]
    assert len(found.short) == NUM_PROMPTS and len(found.long[1].token_ids) == LONG_TOKENS
    firsts = {tuple(prompt[:3]) for prompt, _ in (*found.short, found.long, found.waiting)}
    assert len(firsts) == NUM_PROMPTS + 2
    assert len(found.waiting[0]) == 64 * BLOCK // 4, "a quarter of the KV cache"


@in_no_time
async def test_a_context_that_is_too_small_is_refused() -> None:
    worker = await DoubleOfCluster().worker("decode")
    for small in (
        msgspec.structs.replace(worker, max_model_len=LONG_TOKENS + 10),
        msgspec.structs.replace(worker, load=WorkerLoad(num_blocks=2)),
    ):
        with pytest.raises(CheckFailed, match="too small to check; give a larger --max-model-len or --kv-cache-gib"):
            await expected_answers(DoubleOfCluster(), small, 1.0)  # type: ignore[arg-type]


@in_no_time
async def test_a_right_cluster_passes() -> None:
    cluster, figures = DoubleOfCluster(), dict[str, Any]()
    wanted = await expected(cluster)
    cluster.num_received = 0
    await check_parity(cluster, wanted, figures)  # type: ignore[arg-type]
    assert figures.pop("text").startswith("10 of 10 prompts of 3 to 49 tokens have the same tokens, handed over")
    for role in ("decode", "prefill"):
        figures.clear()
        await check_kill(cluster, role, wanted, 100.0, figures)  # type: ignore[arg-type]
        assert 4 <= figures["arrived"] < LONG_TOKENS and figures["migrated"] == 1 and not figures["ties"]
    figures.clear()
    await measure_rate(cluster, wanted.text, figures)  # type: ignore[arg-type]
    assert figures["bytes_per_s"] == pytest.approx(1e9) and figures["bytes"] == 8 * figures["tokens"] * BLOCK_BYTES


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ({"hands_over": False}, "only 0 prompts were handed over: layouts differ"),
        ({"num_corrupt": 2}, "2 blocks have arrived with another checksum"),
        ({"num_compared": 0}, "no checksum of a block was compared"),
        ({"epoch": 2, "wrong_after": 20}, "other tokens than --workers 1 for a prompt of 3 tokens: token 20 is"),
    ],
)
def test_faults_fail_the_step_of_parity(fault: dict[str, Any], reason: str) -> None:
    @in_no_time
    async def check() -> None:
        wanted, cluster = await expected(DoubleOfCluster()), DoubleOfCluster()
        for name, value in fault.items():
            setattr(cluster, name, value)
        with pytest.raises(CheckFailed, match=reason):
            await check_parity(cluster, wanted, {})  # type: ignore[arg-type]

    check()


@pytest.mark.parametrize(
    ("fault", "kind", "reason"),
    [
        ({"wrong_after": 100}, CheckFailed, "other tokens than --workers 1 after the kill: token 100"),
        ({"ends_before_kill": True}, CheckFailed, "streams of 256 tokens ended before the worker could be killed"),
        ({"hangs_after_kill": True}, TimeoutError, None),
        ({"num_corrupt": 1}, CheckFailed, "1 blocks have arrived"),
    ],
)
def test_faults_fail_the_step_of_a_kill(fault: dict[str, Any], kind: type[Exception], reason: str | None) -> None:
    @in_no_time
    async def check() -> None:
        cluster = DoubleOfCluster()
        wanted = await expected(cluster)
        for name, value in fault.items():
            setattr(cluster, name, value)
        with pytest.raises(kind, match=reason):
            await check_kill(cluster, "decode", wanted, 100.0, {})  # type: ignore[arg-type]

    check()


@in_no_time
async def test_a_rate_needs_kv_that_moves() -> None:
    cluster = DoubleOfCluster()
    cluster.hands_over = False
    with pytest.raises(CheckFailed, match="no KV has moved"):
        await measure_rate(cluster, list(range(100)), {})  # type: ignore[arg-type]


def results() -> tuple[CheckResults, list[str]]:
    shown: list[str] = []
    return CheckResults(shown.append, lambda text: None), shown


def test_a_step_that_fails_is_recorded_and_the_next_one_follows() -> None:
    found, shown = results()
    with found.step("start") as figures:
        figures["text"] = "it serves"
    with found.step("parity"):
        raise CheckFailed("other tokens")
    with found.step("kill decode"):
        raise TimeoutError
    with pytest.raises(asyncio.CancelledError), found.step("kill prefill"):
        raise asyncio.CancelledError
    assert [(step.name, step.is_ok) for step in found.steps] == [
        ("start", True), ("parity", False), ("kill decode", False), ("kill prefill", False),
    ]  # fmt: skip
    assert shown == [
        "ok       start          it serves",
        "FAILED   parity         other tokens",
        "FAILED   kill decode    a request had no answer in time",
        "FAILED   kill prefill   it was stopped, by --timeout-s or by a signal",
    ]


def test_what_a_host_cannot_show_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def skipped(gpus: str, **values: Any) -> dict[str, str]:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
        found, _ = results()
        note_skipped(load_config(None, values), found)
        return found.skipped

    assert set(skipped("")) == {"GPUs", "other hosts"}
    shared = "1 GPU is visible: both workers share it, with 0.45 of its memory each; KV stays on it"
    assert skipped("0")["other GPUs"] == shared
    assert set(skipped("0,1")) == {"other hosts"}
    assert set(skipped("0,1", tensor_parallel_size=2)) == {"other GPUs", "other hosts"}


def test_workers_compare_checksums_and_log_their_choices_while_the_check_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TANDEM_KV_CHECKSUMS", raising=False)
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    with environment_of_workers():
        assert (os.environ["TANDEM_KV_CHECKSUMS"], os.environ["VLLM_LOGGING_LEVEL"]) == ("1", "DEBUG")
        assert vllm_environment(on_gpus=True)["VLLM_LOGGING_LEVEL"] == "DEBUG"
    monkeypatch.delenv("VLLM_LOGGING_LEVEL")
    with environment_of_workers():
        assert os.environ["VLLM_LOGGING_LEVEL"] == "INFO"
    assert not {"TANDEM_KV_CHECKSUMS", "VLLM_LOGGING_LEVEL"} & os.environ.keys()
    assert vllm_environment(on_gpus=True)["VLLM_LOGGING_LEVEL"] == "WARNING"
