"""Plays seeds of the simulator until one shows a mutant, and exits with 1 then.

    python -m tests.mutants.play_seeds NUMBER [tandem | vllm]

Unlike `tandem simulate`, it looks for no smaller run with the same violation, which takes longer than all seeds before.
With an engine's name it plays the first NUMBER seeds whose workers have that engine: no other seed runs its schedulers.
"""

from __future__ import annotations

import signal
import sys
from itertools import count, islice

from tandem.simulator.run import run
from tandem.simulator.scenario import draw

_SEED_LIMIT_S = 30.0
"""CPU time after which the kernel ends the process, which shows the mutant. Most seeds take less than a second."""


def main(number: int, engine: str) -> int:
    played = (scenario for scenario in map(draw, count(1)) if engine in ("", _engine_of(scenario.cluster.runs_vllm)))
    for scenario in islice(played, number):
        signal.setitimer(signal.ITIMER_PROF, _SEED_LIMIT_S)
        if run(scenario).violations:
            return 1
    return 0


def _engine_of(runs_vllm: bool) -> str:
    return "vllm" if runs_vllm else "tandem"


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else ""))
