"""A report with figures that cannot be true loses those figures and nothing else."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.protocol.messages.checks import plausible_count, plausible_figure, plausible_status
from tandem.protocol.messages.membership import PairTraffic, PrefixUpdate, TierFigures, WorkerLoad, WorkerStatus

replace = msgspec.structs.replace
LAST = WorkerLoad(num_blocks=64, waiting_tokens=[(0, 9)], prompt_tokens_per_s=700.0, fixed_step_s=0.02)
GOOD = WorkerLoad(
    num_blocks=65,
    waiting_tokens=[(-5, 3)],
    traffic=[PairTraffic("d", 1, 2, 0.5)],
    tiers=[TierFigures("disk", 3, 4096, 0, 5, 2, 1, 1, "it is full")],
    loaded_tokens_per_s=9.5,
)
PACKED = PrefixUpdate(1, True, b"12345678", b"")
STATUS = WorkerStatus("w", "e", "prefill", GOOD, None, PACKED, tier_prefixes=PACKED)


def test_a_plausible_report_stays_as_it_is() -> None:
    assert plausible_status(STATUS, LAST) == (STATUS, [])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("fixed_step_s", -0.5),
        ("fixed_step_s", math.nan),
        ("step_s_per_sequence", 1e300),
        ("loaded_tokens_per_s", math.inf),
        ("prompt_tokens_per_s", -1.0),
        ("num_running", -1),
        ("num_blocks", 2**63),
        ("waiting_tokens", [(2**40, 1)]),
        ("waiting_tokens", [(0, -1)]),
        ("waiting_tokens", [(0, 1)] * 4097),
        ("traffic", [PairTraffic("d", 1, 2, math.nan)]),
        ("tiers", [TierFigures("host", num_blocks=-1)]),
        ("tiers", [TierFigures("host", max_bytes=2**63)]),
        ("tiers", [TierFigures("host")] * 17),
    ],
    ids=lambda value: str(value)[:40],
)
def test_an_implausible_figure_is_that_of_the_last_report(field: str, value: Any) -> None:
    message = replace(STATUS, load=replace(GOOD, **{field: value}))
    kept = replace(STATUS, load=replace(GOOD, **{field: getattr(LAST, field)}))
    assert plausible_status(message, LAST) == (kept, [f"load.{field}"])


def test_a_rounding_error_is_a_zero() -> None:
    message = replace(STATUS, load=replace(GOOD, fixed_step_s=-3e-18, step_s_per_sequence=5e-324))
    assert plausible_status(message, LAST) == (STATUS, [])


@pytest.mark.parametrize("field", ["prefixes", "tier_prefixes"])
@pytest.mark.parametrize("update", [PrefixUpdate(1, True, b"1234567", b""), PrefixUpdate(1, True, b"", b"123456789")])
def test_truncated_prefixes_are_left_out(field: str, update: PrefixUpdate) -> None:
    kept = replace(STATUS, **{field: None})
    assert plausible_status(replace(STATUS, **{field: update}), LAST) == (kept, [field])


@given(st.floats(), st.integers())
def test_figures_and_counts_are_never_negative_nor_infinite(figure: float, count: int) -> None:
    assert 0 <= plausible_figure(figure) <= 1e15
    assert 0 <= plausible_count(count) < 2**63
    assert 0 <= plausible_count(count, 5) <= 5
