"""The study of elastic workers and fixed ratios."""

from __future__ import annotations

import random

from bench.pd_study import ELASTIC, LAYOUTS, SHAPES, measure, summary


def test_the_summary_compares_elastic_with_the_best_fixed_layout() -> None:
    goodputs = {ELASTIC: 9.0, "1P3D": 2.0, "2P2D": 10.0, "3P1D": 5.0}
    (cell,) = summary([{"shape": "s", "load": 1, "layout": name, "goodput_per_s": g} for name, g in goodputs.items()])
    assert (cell["elastic / best"], cell["worst / best"]) == (0.9, 0.2)


def test_every_layout_serves_the_same_requests() -> None:
    rows = [measure(SHAPES[1], 0.4, layout, 2.0) for layout in LAYOUTS]
    assert len({row["requests"] for row in rows}) == 1 and rows[0]["requests"] > 10
    assert all(row["good"] > 0.5 and row["tpot_ms_mean"] > 12.6 for row in rows)


def test_a_shift_takes_its_sizes_in_order() -> None:
    shift = next(shape for shape in SHAPES if shape.is_shift)
    sizes = [request.num_prompt_tokens for request in shift.requests(random.Random(0), 10.0, 10.0)]
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == 2
