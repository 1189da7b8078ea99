"""`tandem simulate`: runs real workers and proxies in simulated time, with faults, and checks what must always hold."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from rich.console import Console

from tandem.deploy.cluster_config import ClusterConfig, with_device_defaults
from tandem.deploy.commands.status import plain_table
from tandem.runtime.errors import ConfigError
from tandem.runtime.files.whole_file import write_whole

if TYPE_CHECKING:
    from tandem.deploy.planning.player import Played

MAX_STORY_LINES = 200


def seeds_of(seed: int | None, seeds: str) -> Iterator[int]:
    """Returns the seeds to run: one, `A-B`, or all from 1 on. Raises ConfigError."""
    if seed is not None:
        return iter([seed])
    if not seeds:
        return count(1)
    first, dash, last = seeds.partition("-")
    if not (first.isdecimal() and dash and last.isdecimal() and int(first) <= int(last)):
        raise ConfigError(f"--seeds {seeds}: write the first and the last seed, such as 1-500")
    return iter(range(int(first), int(last) + 1))


def simulate(seed: int | None, seeds: str, limit_s: float, log: Path | None) -> int:
    """Runs seeds until one breaks a rule, which is then printed and made smaller. Returns the exit code.

    limit_s: no seed begins after this time. log: gets the events of the last run. Raises ConfigError.
    """
    from tandem.simulator.run import run, shrink
    from tandem.simulator.scenario import draw

    outcomes: Counter[str] = Counter()
    num_runs, num_events, virtual_s, began_at = 0, 0, 0.0, time.monotonic()
    for number in seeds_of(seed, seeds):
        if num_runs and time.monotonic() - began_at > limit_s:
            break
        scenario = draw(number)
        result = run(scenario)
        num_runs, num_events, virtual_s = num_runs + 1, num_events + result.num_events, virtual_s + result.virtual_s
        outcomes.update(result.outcomes)
        if log is not None:
            write_whole(log, "\n".join(result.log.lines()) + "\n")
        if result.violations:
            print(f"seed {number}: {result.violations[0]}")
            smaller, result = shrink(scenario, result)
            config = smaller.cluster.config
            print(
                f"smallest run found: {sum(config.counts.values())} workers, {config.proxies} proxies, "
                f"{len(smaller.requests)} of {len(scenario.requests)} requests, "
                f"{len(smaller.faults)} of {len(scenario.faults)} faults"
            )
            story = result.log.story(result.violations[0].details, smaller.requests)
            if left_out := len(story[:-MAX_STORY_LINES]):
                print(f"{left_out} lines are left out; --log FILE writes all of the first run")
            print("\n".join(story[-MAX_STORY_LINES:]))
            return 1
    took_s = time.monotonic() - began_at
    print(
        f"{num_runs} seeds, no violation; {sum(outcomes.values())} requests: "
        f"{', '.join(f'{number} {outcome}' for outcome, number in sorted(outcomes.items()))}"
    )
    rate = f"{num_runs / took_s * 60:.0f} seeds a minute, {num_events / took_s:,.0f} events a second"
    print(f"{rate}, {virtual_s / took_s:.0f} virtual seconds in one")
    return 0


def simulate_trace(
    config: ClusterConfig, trace: Path, step_times: Path | None, report: Path | None, plot: Path | None
) -> None:
    """Plays the trace and prints what came of it. Raises ConfigError.

    step_times: what `tandem status --json` printed, or figures of a worker. report: gets JSON. plot: an image.
    """
    from tandem.deploy.planning.player import Player
    from tandem.deploy.planning.trace import read_trace
    from tandem.deploy.planning.worker_figures import planned_shape, read_figures

    if step_times is None:
        raise ConfigError("--step-times is missing: give a file with what `tandem status --json` prints on a cluster")
    if plot is not None:
        _pyplot()  # before the work
    figures = read_figures(step_times)
    requests = read_trace(trace, figures.max_model_len)
    config = with_device_defaults(config, on_gpus=config.engine_settings.device == "cuda")
    shape = planned_shape(figures, config)
    began_at = time.monotonic()
    played = Player(requests, shape).play()
    took_s = time.monotonic() - began_at
    targets = (("ttft_s", config.admission.ttft_slo_ms), ("itl_s", config.itl_slo_ms))
    limits = {name: ms / 1000 for name, ms in targets if ms}
    summary = played.summary(**limits)
    _print(summary, bool(limits), took_s)
    if report is not None:
        content = {"cluster": config.counts, "worker": figures, **summary}
        write_whole(report, msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n")
    if plot is not None:
        _draw(played, plot)


def _print(summary: dict[str, Any], has_limits: bool, took_s: float) -> None:
    table = plain_table(["ms"], ["mean", "p50", "p90", "p99", "max"])
    for name in ("ttft", "itl", "tpot", "e2e"):
        table.add_row(name.upper(), *(f"{value:.1f}" for value in summary[f"{name}_ms"].values()))
    console = Console(highlight=False)
    console.print(table)
    failed = ", ".join(f"{count} {code}" for code, count in summary["errors"].items())
    console.print(
        f"\n{summary['requests']} requests in {summary['duration_s']:.1f} s (simulated in {took_s:.1f} s), "
        f"{summary['output_tokens_per_s']:.1f} output tokens/s; errors: {failed or 'none'}"
    )
    if has_limits:
        share, per_s = summary["goodput"], summary["goodput_per_s"]
        console.print(
            f"goodput: {100 * share:.1f} % of the requests keep --ttft-slo-ms and --itl-slo-ms, {per_s:.2f}/s"
        )


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib: pip install matplotlib") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def _draw(played: Played, file: Path) -> None:
    """Draws the shares of requests and tokens below each latency, and the TTFT over time."""
    plt = _pyplot()
    whole = [each for each in played.served if not each.error]
    figure, (shares, course) = plt.subplots(1, 2, figsize=(11, 4))
    for name, values in (("TTFT", [each.ttft_s for each in whole]), ("ITL", played.gaps_s)):
        ordered = sorted(values)
        shares.plot(
            [1000 * value for value in ordered], [(n + 1) / len(ordered) for n in range(len(ordered))], label=name
        )
    shares.set(xscale="log", xlabel="ms", ylabel="share at most this long")
    shares.legend()
    course.plot([each.sent_at for each in whole], [1000 * each.ttft_s for each in whole], ".", markersize=3)
    course.set(xlabel="sent at, s", ylabel="TTFT, ms")
    try:
        figure.savefig(file, bbox_inches="tight")
    except (OSError, ValueError) as error:  # ValueError: of the name's suffix
        raise ConfigError(f"--plot {file}: {error}") from error
    finally:
        plt.close(figure)
