"""Drawn attacks: what is drawn, and few cases in which each two values of the dimensions occur, beside a second tenant.

`make attack` draws cases from all dimensions, for as long as one likes.
"""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path

import pytest

from tests.security.drawn_attacks import Bounds, attacked
from tests.security.drawn_bodies import Values, bodies_of
from tests.security.drawn_case import (
    DIMENSIONS,
    MAX_BYTES,
    MAX_TOKENS,
    NEUTRAL_FIELDS,
    Case,
    covering,
    drawn,
    field_of,
    pairwise,
    shape_of,
)
from tests.security.largest_bodies import all_structs, bodies

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


def waves() -> list[list[Case]]:
    cases = covering("fields", ONE_FIELD)
    together = [cases[first : first + TOGETHER] for first in range(0, len(cases), TOGETHER)]
    return [*together, *([case] for dimensions in ALONE for case in covering("many", dimensions))]


@pytest.mark.exhaustive
@pytest.mark.alone
def test_one_client_harms_no_other(tmp_path: Path) -> None:
    with attacked(tmp_path, Bounds(), attack_s=ATTACK_S, has_screening=False) as server:
        found = [str(result) for wave in waves() for result in server.search(wave) if result.found]
    assert not found, "\n".join(found)


def test_each_two_values_of_different_dimensions_occur_together() -> None:
    dimensions = {"a": (1, 2, 3), "b": ("x", "y", "z", "w"), "c": (True, False), "d": (0, 1, 2)}
    rows = pairwise(dimensions, "seed")
    assert len(rows) <= 2 * 3 * 4
    for one, other in combinations(dimensions, 2):
        together = {(row[one], row[other]) for row in rows}
        assert together == {(a, b) for a in dimensions[one] for b in dimensions[other]}


def test_a_seed_names_a_case_that_is_bounded() -> None:
    assert drawn("1/7") == drawn("1/7") != drawn("1/8")
    for number in range(500):
        case = drawn(f"1/{number}")
        assert case.at_once * case.size <= MAX_BYTES
        assert case.max_tokens == 1 or case.at_once * case.n * case.max_tokens <= MAX_TOKENS
        assert case.media == "none" or case.route in ("chat", "response", "message")


def test_rows_that_cover_all_pairs_take_other_dimensions_from_their_first_values() -> None:
    cases = covering("x", {"n": (1, 60), "client": DIMENSIONS["client"]})
    assert {(case.n, case.client) for case in cases} == {(n, each) for n in (1, 60) for each in DIMENSIONS["client"]}
    assert {case.size for case in cases} == {DIMENSIONS["size"][0]}


def test_each_shape_has_values_of_a_body_that_generates() -> None:
    """The names of largest values decide on their shape, so a renamed one must not fall out of its shape."""
    shapes = dict[str, set[str]]()
    for name, _ in bodies(all_structs()["chat"], 7000):
        if field_of(name) not in NEUTRAL_FIELDS:
            shapes.setdefault(shape_of(name), set()).add(field_of(name))
    assert set(DIMENSIONS["shape"]) == set(shapes)
    assert {"structured_outputs", "response_format", "tools"} <= shapes["schema"]
    assert "structured_outputs" in shapes["grammar"] and "stop" in shapes["texts"]
    assert {"allowed_token_ids", "stop_token_ids", "logprob_token_ids"} <= shapes["numbers"]
    assert "logit_bias" in shapes["map"] and {"prompt_logprobs", "top_logprobs"} <= shapes["count"]


@pytest.mark.parametrize("route", ["chat", "response", "message", "batch"])
def test_a_body_has_its_largest_value_among_sequences_prompt_and_media(route: str) -> None:
    values = Values(has_screening=False)
    row = {"route": (route,), "n": (60,), "at_once": (2,), "media": ("small",)}
    for shape in ("schema", "text"):
        [case] = covering(route, row | {"shape": (shape,)})
        name, made = bodies_of(case, values, 66)
        field = field_of(name)
        for body in made:
            content = json.loads(body)
            assert field in content and content["model"] == "m"
            assert content.get("n", 60) == 60
            assert (b"base64" in body) == (case.media == "small" and field not in ("messages", "input"))
        assert made[0] != made[1] or field in ("prompt", "input", "messages")
