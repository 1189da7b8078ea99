"""Finds the largest values that a reader needs longest for. Each is read in a process that is ended in time."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

from tandem.proxy.proxy_config import ProxyConfig
from tandem.proxy.reading.body_reader import BodyReader
from tandem.proxy.text.model_text import ModelText
from tests.security.drawn_case import NEUTRAL_FIELDS, field_of, shape_of
from tests.security.largest_bodies import all_structs, bodies
from tests.security.largest_values import read
from tests.support.noise_model import ensure_noise_model

MAX_S = 20
LIMIT_S = 0.3
"""CPU time after which a value counts as costly, and is left."""
SCREENED_BYTES = 7000
NUM_COSTLIEST = 4


class Screened:
    """Costs are measured when they are first asked for, by a small process that forks another for each value."""

    def __init__(self) -> None:
        self._costs: dict[tuple[str, str], dict[str, float]] = {}

    def costliest(self, kind: str, shape: str) -> list[str]:
        """Returns the names of the NUM_COSTLIEST values of a shape, those that take longest first."""
        if (kind, shape) not in self._costs:
            command = [sys.executable, "-m", "tests.security.screening", kind, shape]
            done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], check=True)
            self._costs[kind, shape] = json.loads(done.stdout.splitlines()[-1])
        costs = self._costs[kind, shape]
        return sorted(costs, key=lambda name: -costs[name])[:NUM_COSTLIEST]


def screened(kind: str, shape: str) -> dict[str, float]:
    """Returns the CPU time of reading each value, inf for those that take longer than LIMIT_S."""
    model = str(ensure_noise_model())
    reader = BodyReader(ModelText(model), ProxyConfig("proxy-0", "", model, "m"))
    values = bodies(all_structs()[kind], SCREENED_BYTES)
    wanted = ((name, body) for name, body in values if field_of(name) not in NEUTRAL_FIELDS and shape_of(name) == shape)
    return {name: _cost(reader, kind, body) for name, body in wanted}


def _cost(reader: BodyReader, kind: str, body: bytes) -> float:
    if (pid := os.fork()) == 0:
        signal.setitimer(signal.ITIMER_PROF, LIMIT_S)  # its signal ends the process
        signal.alarm(MAX_S)
        read(reader, kind, body)
        os._exit(0)
    _, status, used = os.wait4(pid, 0)
    return used.ru_utime + used.ru_stime if os.WIFEXITED(status) else math.inf


if __name__ == "__main__":
    print(json.dumps(screened(*sys.argv[1:])))
