"""Page made from the reports of all benchmarks."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.support.report import Aim, Report, page, read_reports

RESULTS = Path(__file__).parents[3] / "bench" / "results"


def test_the_page_lists_aims_failures_dates_and_commits() -> None:
    aims = [Aim.of("ms", 36.6, 40, "lower"), Aim.of("GB/s", 3.0, 4.0, "higher")]
    report = Report(
        "engine", "python -m bench.engine", {"cores": 2}, {"python": "3.11"}, {}, aims, "2026-11-23", "abc1234"
    )
    text = page({"engine": report}, {"kv_tiers": "exit status 1, see kv_tiers.log"}, "Results")
    assert "| ms | 36.6 | at most 40 | yes |" in text
    assert "| GB/s | 3 | at least 4 | no |" in text
    assert "| [engine](#engine) | 1 of 2 | 2026-11-23 | abc1234 | `python -m bench.engine` |" in text
    assert "| kv_tiers | failed: exit status 1, see kv_tiers.log | | | `python -m bench.kv_tiers` |" in text
    assert "cores 2" in text and "python 3.11" in text


def test_the_committed_page_shows_all_committed_results() -> None:
    """If not, run `python -m bench.all --report-only`."""
    reports = read_reports(RESULTS)
    assert len(reports) > 10 and all(report.measured_on and report.commit for report in reports.values())
    assert (RESULTS / "REPORT.md").read_text() == page(reports, {}, "Benchmark results")


def test_an_unknown_result_file_is_named_in_the_error(tmp_path: Path) -> None:
    (tmp_path / "odd.json").write_text('{"figures": 3}')
    with pytest.raises(SystemExit, match=r"odd\.json is not a benchmark report"):
        read_reports(tmp_path)
