"""The bodies of a drawn case: its fields at their largest, and around them sequences, prompt and media.

`python -m tests.security.drawn_bodies KIND SHAPE` prints how long a reader needs for each of the largest values of a
shape. Each is read in a process that is ended in time.
"""

from __future__ import annotations

import json
import math
import os
import random
import re
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from tests.security.drawn_case import NEUTRAL_FIELDS, Case, field_of, shape_of
from tests.security.largest_bodies import all_structs, bodies
from tests.support.media_proxy import data_url
from tests.support.vision_model import encoded, picture

MAX_S = 20
LIMIT_S = 0.3
"""CPU time after which a value counts as costly, and is left."""
SCREENED_BYTES = 7000
NUM_COSTLIEST = 4


def costliest(kind: str, shape: str) -> list[str]:
    """Returns the names of the NUM_COSTLIEST values of a shape, those that take longest first."""
    command = [sys.executable, "-m", "tests.security.drawn_bodies", kind, shape]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], check=True)
    costs = json.loads(done.stdout.splitlines()[-1])
    return sorted(costs, key=lambda name: -costs[name])[:NUM_COSTLIEST]


def screened(kind: str, shape: str) -> dict[str, float]:
    """Returns the CPU time of reading each value, inf for those that take longer than LIMIT_S."""
    from tests.security.largest_values import make_reader, read

    reader = make_reader()

    def cost(body: bytes) -> float:
        if (pid := os.fork()) == 0:
            signal.setitimer(signal.ITIMER_PROF, LIMIT_S)  # its signal ends the process
            signal.alarm(MAX_S)
            read(reader, kind, body)
            os._exit(0)
        _, status, used = os.wait4(pid, 0)
        return used.ru_utime + used.ru_stime if os.WIFEXITED(status) else math.inf

    values = bodies(all_structs()[kind], SCREENED_BYTES)
    wanted = ((name, body) for name, body in values if field_of(name) not in NEUTRAL_FIELDS and shape_of(name) == shape)
    return {name: cost(body) for name, body in wanted}


class Values:
    """The largest values of each shape. has_screening: it finds out which of them take longest to read, in minutes."""

    def __init__(self, has_screening: bool) -> None:
        self._costliest = cache(costliest) if has_screening else lambda kind, shape: []

    def largest(self, case: Case) -> tuple[str, bytes]:
        """Returns the name of the value, which begins with its field, and a body with it."""
        kind = kind_of(case)
        rng = random.Random(case.seed + " value")
        found = self._costliest(kind, case.shape) if case.is_costliest else []
        wanted = _without_numbers(rng.choice(found)) if found else None
        fields = [field_of(wanted)] if wanted is not None else None
        by_field = dict[str, list[tuple[str, bytes]]]()
        for name, body in bodies(all_structs()[kind], case.size, fields):
            first = field_of(name)
            is_wanted = wanted is None or _without_numbers(name) == wanted
            if first not in NEUTRAL_FIELDS and shape_of(name) == case.shape and is_wanted:
                by_field.setdefault(first, []).append((name, body))
        return rng.choice(by_field[rng.choice(sorted(by_field))]) if by_field else ("", b"{}")


def _without_numbers(name: str) -> str:
    """Names of values have numbers that depend on the size."""
    return re.sub(r"\d+", "", name)


def kind_of(case: Case) -> str:
    return "completion" if case.route == "batch" else case.route


def bodies_of(case: Case, values: Values, forced_token: int) -> tuple[str, list[bytes]]:
    """Returns what is at its largest, and a body for each request. forced_token: of the letter."""
    name, largest = values.largest(case)
    own = {field.encode_name for field in msgspec.structs.fields(all_structs()[kind_of(case)])}
    own.discard(field_of(name))
    return name, [
        _joined(largest[1:-1], {key: value for key, value in _around(case, each, forced_token).items() if key in own})
        for each in range(case.at_once)
    ]


def _joined(largest: bytes, around: dict[str, Any]) -> bytes:
    return b"{" + largest + (b"," if largest else b"") + json.dumps(around).encode()[1:]


def _around(case: Case, number: int, forced_token: int) -> dict[str, Any]:
    """Fields of all routes; each body takes those that it has. No two requests have one prompt or one picture."""
    words = f"{number} {case.seed} " + "a" * case.num_prompt_tokens
    words = words[: case.num_prompt_tokens]
    fields: dict[str, Any] = {
        "model": "m", "n": case.n, "max_tokens": case.max_tokens, "max_output_tokens": max(case.max_tokens, 16),
        "ignore_eos": True, "prompt": words, "input": words, "tokens": [97] * case.num_prompt_tokens,
        "stream": case.client in ("reads slowly", "never reads", "leaves at the first event")
    }  # fmt: skip
    if case.is_forced:
        fields["logit_bias"] = {str(forced_token): 100}
    if case.route == "tokenize":
        return fields
    parts = _pictures(case, number)
    if not parts:
        return fields | {"messages": [{"role": "user", "content": words}]}
    urls = [data_url(each) for each in parts]
    if case.route == "response":
        content = [{"type": "input_text", "text": words}, *({"type": "input_image", "image_url": url} for url in urls)]
        return fields | {"input": [{"role": "user", "content": content}]}
    if case.route == "message":
        sources = [{"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]} for url in urls]
        images = [{"type": "image", "source": source} for source in sources]
    else:
        images = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return fields | {"messages": [{"role": "user", "content": [{"type": "text", "text": words}, *images]}]}


def _pictures(case: Case, number: int) -> list[bytes]:
    first = hash_of(case.seed) + number * 8
    match case.media:
        case "small":
            return [small_picture(first)]
        case "large":
            return [large_picture(first)]
        case "many":
            return [small_picture(first + each) for each in range(8)]
    return []


def hash_of(text: str) -> int:
    return random.Random(text).randrange(1 << 30)


@cache
def small_picture(seed: int) -> bytes:
    return encoded(picture(100, 80, seed=seed))


@cache
def large_picture(seed: int) -> bytes:
    return encoded(picture(1600, 1200, seed=seed))


if __name__ == "__main__":
    print(json.dumps(screened(*sys.argv[1:])))
