"""`tandem simulate`: runs real workers and proxies in simulated time, with faults, and checks what must always hold."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from itertools import count
from pathlib import Path

from tandem.runtime.errors import ConfigError
from tandem.runtime.files.whole_file import write_whole

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
    from tandem.simulator.run import run
    from tandem.simulator.scenario import draw
    from tandem.simulator.shrink import shrink

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
