"""The steps of `tandem engine check`, in order, on clusters with the operator's model and settings.

One worker that does both phases answers first: its tokens are what the others must give. Then a prefill and a decode
worker answer the same prompts, lose either worker in the middle of a stream, and move long prompts. Requests go one at
a time, so that products have the same numbers of rows on both sides and the same bits are expected, also in 16 bits.
Workers compare the checksums of all blocks that move.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from tandem.deploy.cluster_config import ClusterConfig, load_config
from tandem.deploy.engine_check.answers import CheckedAnswer, first_difference, largest_error
from tandem.deploy.engine_check.check_report import CheckReport, StepName, StepResult, expected_engine
from tandem.deploy.engine_check.check_settings import SETTLED
from tandem.deploy.engine_check.checked_cluster import CHECKSUMS, CheckedCluster, CheckFailed, role_of, running
from tandem.deploy.engine_check.host_facts import (
    device_name,
    driver_version,
    engine_view,
    folder_name,
    host_hash,
    shown_environment,
    smi_text,
    uses_gpus,
    without_names,
)
from tandem.deploy.processes.engine_python import find_engine_python, vllm_environment
from tandem.deploy.processes.gpu_environment import visible_gpus
from tandem.protocol.messages.membership import Role, StatusReport, WorkerReport
from tandem.runtime.errors import TandemError, first_line
from tandem.runtime.tasks import start
from tandem.runtime.version import own_version

NUM_PROMPTS, NUM_TOKENS = 10, 24
MIN_TOKENS = 16
"""Least length of the longest prompt, and of the text from which prompts are made."""
LONG_TOKENS = 256
"""Length of the answers during which workers are killed."""
KILLED_AFTER = 4
"""Tokens of such an answer that have arrived before."""
MAX_KILLS = 3
"""Attempts to kill a worker before a fast engine has ended the stream."""
NUM_MOVED, MAX_MOVED_TOKENS = 8, 2048
"""Prompts whose transfer is timed, and their largest length."""
REQUEST_TIMEOUT_S = 120.0
"""Limit on a request whose workers are there."""
TEXT = (
    "The harbour was quiet before the first boats came in. A clerk counted crates of apples, wrote the numbers into a "
    "long ledger, and compared them with the list that had come from the city a day before. Some crates were missing, "
    "as they were every spring, when the river rose and the road along the hills could not be used. He explained to "
    "the captain that a shipment is complete only if every crate has its number, and if two lists agree in each line. "
)
Show = Callable[[str], None]


@dataclass
class CheckResults:
    """What the steps have found so far. show: called with one line for each step; progress: with what happens now."""

    show: Show
    progress: Show
    steps: list[StepResult] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    logs: dict[str, str] = field(default_factory=dict)
    engine: str = ""
    """Name and version, as the workers report it."""

    @contextmanager
    def step(self, name: StepName) -> Iterator[dict[str, Any]]:
        """Records how the step ends. Yields its figures, of which `text` is the line to show. What fails stays in it,
        because the next step may show more."""
        figures: dict[str, Any] = {}
        began_at = time.monotonic()
        self.progress(name)
        try:
            yield figures
            self._end(name, True, figures.pop("text"), began_at, figures)
        except asyncio.CancelledError:
            self._end(name, False, "it was stopped, by --timeout-s or by a signal", began_at, figures)
            raise
        except Exception as error:
            reason = "a request had no answer in time" if isinstance(error, TimeoutError) else first_line(error)
            self._end(name, False, without_names(reason), began_at, figures)

    def _end(self, name: StepName, is_ok: bool, text: str, began_at: float, figures: dict[str, Any]) -> None:
        self.steps.append(StepResult(name, is_ok, text, round(time.monotonic() - began_at, 2), figures))
        self.show(f"{'ok' if is_ok else 'FAILED':8} {name:14} {text}")

    def skip(self, what: str, reason: str) -> None:
        self.skipped[what] = reason
        self.show(f"skipped  {what:14} {reason}")


@dataclass(frozen=True)
class Expected:
    """Prompts and the answers of one worker to them."""

    short: list[tuple[list[int], CheckedAnswer]]
    """With lengths around the first boundaries of blocks."""
    long: tuple[list[int], CheckedAnswer]
    """A short prompt with a long answer."""
    waiting: tuple[list[int], CheckedAnswer]
    """A long prompt, which takes a while to compute."""
    text: list[int]
    start_s: float


class EngineCheck:
    """file, given: the operator's settings."""

    def __init__(self, file: Path | None, given: Mapping[str, Any], results: CheckResults) -> None:
        self._file, self._given, self._results = file, dict(given), results

    async def run(self) -> None:
        """Does all steps, as far as they can be done, and leaves nothing behind, also if it is cancelled."""
        with environment_of_workers():
            expected = await self._compute_expected()
            if expected is not None:
                await self._check_apart(expected)

    async def _compute_expected(self) -> Expected | None:
        """Returns None if the cluster cannot be started."""
        results, found = self._results, None
        with results.step("start") as figures:
            began_at = time.monotonic()
            async with self._running("together", workers=1) as cluster:
                start_s = time.monotonic() - began_at
                figures["start_s"] = round(start_s, 2)
                worker = role_of(await cluster.settled_report(), "any")
                results.engine = worker.engine
                found = await expected_answers(cluster, worker, start_s)
            figures["text"] = f"--workers 1 serves after {start_s:.0f} s, and has answered {NUM_PROMPTS} prompts"
        return found

    async def _check_apart(self, expected: Expected) -> None:
        results, cluster = self._results, None
        limit_s = REQUEST_TIMEOUT_S + 3 * expected.start_s  # of a request that waits for another worker to start
        async with AsyncExitStack() as stack:
            with results.step("parity") as figures:
                cluster = await stack.enter_async_context(self._running("apart", prefill=1, decode=1))
                await check_parity(cluster, expected, figures)
            if cluster is None:
                return
            with results.step("kill decode") as figures:
                await check_kill(cluster, "decode", expected, limit_s, figures)
            with results.step("kill prefill") as figures:
                await check_kill(cluster, "prefill", expected, limit_s, figures)
            with results.step("transfer rate") as figures:
                await measure_rate(cluster, expected.text, figures)

    @asynccontextmanager
    async def _running(self, name: str, **counts: int) -> AsyncIterator[CheckedCluster]:
        def progress(text: str, fraction: float | None) -> None:
            self._results.progress(
                f"starting {' '.join(f'--{role} {count}' for role, count in counts.items())}: {text}"
            )

        settings = {**self._given, **counts}
        async with running(name, self._file, settings, progress, self._results.logs) as cluster:
            yield cluster


async def expected_answers(cluster: CheckedCluster, worker: WorkerReport, start_s: float) -> Expected:
    block, room = worker.block_size, worker.max_model_len - 1
    text = await cluster.tokenize(TEXT)
    if len(text) < MIN_TOKENS:
        raise CheckFailed(f"the model's tokeniser makes {len(text)} tokens of {len(TEXT)} characters")
    num_pool_tokens = worker.load.num_blocks * block
    longest = min(MAX_MOVED_TOKENS, room - LONG_TOKENS, num_pool_tokens // 4)
    if longest < MIN_TOKENS:
        raise CheckFailed(
            f"a context of {worker.max_model_len} tokens and a KV cache of {num_pool_tokens} are too small to check; "
            "give a larger --max-model-len or --kv-cache-gib"
        )
    boundaries = [
        3,
        *(each for number in (1, 2, 3) for each in (number * block - 1, number * block, number * block + 1)),
    ]
    lengths = [min(each, longest) for each in boundaries]

    async def answer(prompt: list[int], num_tokens: int) -> tuple[list[int], CheckedAnswer]:
        async with asyncio.timeout(REQUEST_TIMEOUT_S):
            return prompt, await cluster.complete(prompt, min(num_tokens, room - len(prompt)))

    short = [await answer(_rotated(text, 7 * number, length), NUM_TOKENS) for number, length in enumerate(lengths)]
    long = await answer(_rotated(text, 5, min(2 * block + 3, longest)), LONG_TOKENS)
    waiting = await answer(_rotated(text, 11, longest), NUM_TOKENS)
    return Expected(short, long, waiting, text, start_s)


async def check_parity(cluster: CheckedCluster, expected: Expected, figures: dict[str, Any]) -> None:
    equal, ties, error = 0, [], 0.0
    for prompt, wanted in expected.short:
        async with asyncio.timeout(REQUEST_TIMEOUT_S):
            found = await cluster.complete(prompt, len(wanted.token_ids))
        error = max(error, largest_error(wanted, found))
        difference = first_difference(wanted, found)
        if difference is None:
            equal += 1
        elif difference.is_tie:
            ties.append(f"prompt of {len(prompt)} tokens: {difference}")
        else:
            raise CheckFailed(f"other tokens than --workers 1 for a prompt of {len(prompt)} tokens: {difference}")
    report = await cluster.settled_report()
    decode = role_of(report, "decode")
    figures |= {"equal": equal, "ties": ties, "largest_logprob_error": error, "connector": _connector(report)}
    figures |= {"received": decode.load.num_received, "pairs": [each.reason for each in _pairs(report) if each.reason]}
    if decode.load.num_received < len(expected.short):
        reason = "; ".join(figures["pairs"]) or "no reason is known"
        raise CheckFailed(f"only {decode.load.num_received} prompts were handed over: {reason}")
    check_blocks(report)
    lengths = sorted(len(prompt) for prompt, _ in expected.short)
    tied = f", {len(ties)} up to a tie" if ties else ""
    figures["text"] = (
        f"{equal} of {len(expected.short)} prompts of {lengths[0]} to {lengths[-1]} tokens have the same tokens{tied}, "
        f"handed over through {_connector(report)}"
    )


async def check_kill(
    cluster: CheckedCluster, role: Role, expected: Expected, limit_s: float, figures: dict[str, Any]
) -> None:
    """Kills the worker of a role while a stream decodes and another prompt waits for its first token."""
    wanted = [answer for _, answer in (expected.long, expected.waiting)]
    for _ in range(MAX_KILLS):
        victim, before = await cluster.worker(role), await cluster.num_migrations()
        async with asyncio.timeout(limit_s):
            kill, found = await _answers_with_kill(cluster, victim, expected)
            await cluster.until_replaced(victim)
        replaced_s = round(time.monotonic() - kill.at, 1)
        ties = []
        for one, other in zip(wanted, found, strict=True):
            if (difference := first_difference(one, other)) is not None:
                if not difference.is_tie:
                    raise CheckFailed(f"other tokens than --workers 1 after the kill: {difference}")
                ties.append(str(difference))
        num_migrated = await cluster.num_migrations() - before
        if num_migrated or role == "prefill":
            break
    else:
        raise CheckFailed(f"streams of {len(wanted[0].token_ids)} tokens ended before the worker could be killed")
    check_blocks(await cluster.settled_report())
    figures |= {"arrived": kill.num_arrived, "migrated": num_migrated, "replaced_s": replaced_s, "ties": ties}
    tied = f" up to a tie ({'; '.join(ties)})" if ties else ""
    figures["text"] = (
        f"kill -9 after {kill.num_arrived} of {len(wanted[0].token_ids)} tokens: both streams ended with the right "
        f"tokens{tied}; another worker was there after {replaced_s:.1f} s"
    )


class Kill(NamedTuple):
    num_arrived: int
    """Tokens of the long answer that had arrived before."""
    at: float


async def _answers_with_kill(
    cluster: CheckedCluster, victim: WorkerReport, expected: Expected
) -> tuple[Kill, list[CheckedAnswer]]:
    num_arrived, has_begun = 0, asyncio.Event()

    def on_token(number: int) -> None:
        nonlocal num_arrived
        num_arrived = number
        if number >= KILLED_AFTER:
            has_begun.set()

    (prompt, wanted), (later_prompt, later_wanted) = expected.long, expected.waiting
    tasks = [start(cluster.complete(prompt, len(wanted.token_ids), on_token))]
    try:
        tasks[0].add_done_callback(lambda _: has_begun.set())
        await has_begun.wait()
        tasks.append(start(cluster.complete(later_prompt, len(later_wanted.token_ids))))
        await asyncio.sleep(0.01)  # so that it has reached a worker
        kill = Kill(num_arrived, time.monotonic())
        cluster.kill(victim)
        return kill, [await each for each in tasks]
    finally:
        for each in tasks:
            each.cancel()


async def measure_rate(cluster: CheckedCluster, text: list[int], figures: dict[str, Any]) -> None:
    prefill = role_of(await cluster.settled_report(), "prefill")
    num_pool_tokens = prefill.load.num_blocks * prefill.block_size
    length = max(1, min(MAX_MOVED_TOKENS, prefill.max_model_len - NUM_TOKENS, num_pool_tokens // 4))
    draw = random.Random(1)
    for _ in range(NUM_MOVED):
        async with asyncio.timeout(REQUEST_TIMEOUT_S):
            await cluster.complete(draw.choices(text, k=length), 2)
    report = await cluster.settled_report()
    after, before = _traffic(role_of(report, "prefill")), _traffic(prefill)
    num_bytes, seconds = after[0] - before[0], after[1] - before[1]
    if seconds <= 0:
        raise CheckFailed("no KV has moved")
    check_blocks(report)
    figures |= {"bytes": num_bytes, "seconds": seconds, "bytes_per_s": num_bytes / seconds, "tokens": length}
    figures["text"] = (
        f"{num_bytes / seconds / 1e9:.3g} GB/s through {_connector(report)}: {num_bytes / 1e6:.3g} MB of KV for "
        f"{NUM_MOVED} prompts of {length} tokens"
    )


def _traffic(prefill: WorkerReport) -> tuple[int, float]:
    """Bytes and seconds of KV that a prefill worker has shipped."""
    return sum(each.num_bytes for each in prefill.load.traffic), sum(each.shipping_s for each in prefill.load.traffic)


def check_blocks(report: StatusReport) -> None:
    loads = [each.load for each in report.workers]
    if corrupt := sum(load.num_corrupt_blocks for load in loads):
        raise CheckFailed(f"{corrupt} blocks have arrived with another checksum than they were sent with")
    if not sum(load.num_compared_blocks for load in loads):
        raise CheckFailed("no checksum of a block was compared")


def _pairs(report: StatusReport) -> list[Any]:
    return [pair for worker in report.workers for pair in worker.pairs]


def _connector(report: StatusReport) -> str:
    return next((pair.connector for pair in _pairs(report) if pair.state == "ready"), "no connector")


def _rotated(tokens: list[int], first: int, length: int) -> list[int]:
    """Returns tokens of the text from another place on, so that no two prompts share their first block."""
    first %= len(tokens)
    once = [*tokens[first:], *tokens[:first]]
    return (once * -(-length // len(once)))[:length]


@contextmanager
def environment_of_workers() -> Iterator[None]:
    """Lets workers that are started in this context compare the checksums of blocks, and vLLM log its choices."""
    given = {CHECKSUMS: "1", "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL") or "INFO"}
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


# ---- around the steps


def note_skipped(config: ClusterConfig, results: CheckResults) -> None:
    """Says what the check cannot try on this host."""
    gpus = visible_gpus(config.engine_settings.device, os.environ) or []
    num_ranks = config.tensor_parallel_size
    if not uses_gpus(config):
        results.skip("GPUs", "the workers run on the CPU, so nothing is said about GPUs")
    elif len(gpus) < 2 * num_ranks:
        share = config.engine_settings.gpu_memory_fraction / 2
        shared = f"both workers share it, with {share:g} of its memory each" if num_ranks == 1 else "workers share them"
        results.skip("other GPUs", f"{len(gpus) or 'an unknown number of'} GPU is visible: {shared}; KV stays on it")
    results.skip("other hosts", "KV between hosts needs a second one (docs/deploy.md)")


async def run_check(
    file: Path | None, given: Mapping[str, Any], timeout_s: float, results: CheckResults
) -> CheckReport:
    """Runs the check, until the deadline at most. Raises ConfigError for settings that cannot work anywhere."""
    config = load_config(file, {**SETTLED, **given, "workers": 1})
    note_skipped(config, results)
    with suppress(TimeoutError):  # the step that ran says so
        async with asyncio.timeout(timeout_s):
            await EngineCheck(file, given, results).run()
    results.progress("reading versions and devices")
    return await asyncio.to_thread(_report, config, given, results)


def _report(config: ClusterConfig, given: Mapping[str, Any], results: CheckResults) -> CheckReport:
    on_gpus = uses_gpus(config)
    python, environment = "", dict[str, str]()
    if config.engine == "vllm":
        environment = vllm_environment(on_gpus, config.engine_settings.exact)
        with suppress(TandemError):
            python = str(find_engine_python(config.engine_python).path)
    view = engine_view(python, environment)
    return CheckReport(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        host=host_hash(),
        device=device_name(on_gpus),
        engine=results.engine or expected_engine(config),
        tandem=own_version(),
        driver=driver_version() if on_gpus else "",
        model=folder_name(config.engine_settings.model),
        settings={name: without_names(str(value)) for name, value in given.items() if name != "model"},
        steps=results.steps,
        skipped=results.skipped,
        versions=view["versions"],
        torch=view["torch"],
        nvidia_smi=without_names(smi_text()) if on_gpus else "",
        environment=shown_environment({**os.environ, **environment}),
        logs=results.logs,
    )
