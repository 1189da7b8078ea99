"""Few cases in which each two values of the dimensions of an attack occur together, beside a second tenant.

`make attack` draws cases from all dimensions, for as long as one likes.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.security.drawn_attacks import Bounds, attacked
from tests.security.drawn_case import Case, covering

pytestmark = [pytest.mark.exhaustive, pytest.mark.alone]

ATTACK_S = 8.0
"""Of each wave: there are six."""
TOGETHER = 16
"""Cases that run at once. Where they do harm, halves of them run again, so that the message names the case."""
ONE_FIELD = {
    "route": ("chat", "response", "completion"),
    "shape": ("schema", "grammar", "texts", "numbers", "map", "count"),
    "n": (1, 60),
    "max_tokens": (30,),
    "media": ("none", "small"),
    "at_once": (1, 4),
    "client": ("reads", "leaves soon", "leaves at the first event", "never reads"),
}
MANY_CLIENTS = {
    "route": ("chat",),
    "num_prompt_tokens": (9000,),
    "media": ("small",),
    "at_once": (100,),
    "client": ("reads",),
}
CONNECTIONS = {"route": ("chat",), "size": (450_000,), "at_once": (130,), "client": ("sends nothing", "sends slowly")}
DOWNLOADS = {"route": ("download",), "at_once": (100,), "client": ("never reads",)}

ALONE = (MANY_CLIENTS, CONNECTIONS, DOWNLOADS)


class Unscreened:
    """Any value of a shape is drawn. `make attack` first measures which of them cost most."""

    def costliest(self, kind: str, shape: str) -> list[str]:
        return []


def waves() -> list[list[Case]]:
    cases = covering("fields", ONE_FIELD)
    together = [cases[first : first + TOGETHER] for first in range(0, len(cases), TOGETHER)]
    return [*together, *([case] for dimensions in ALONE for case in covering("many", dimensions))]


def test_one_client_harms_no_other(tmp_path: Path) -> None:
    with attacked(tmp_path, Bounds(), attack_s=ATTACK_S, screening=Unscreened()) as server:
        found = [str(result) for wave in waves() for result in server.search(wave) if result.found]
    assert not found, "\n".join(found)
