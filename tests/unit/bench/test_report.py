"""The page that all benchmarks' results become."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.report import Aim, Report
from bench.report_page import REPORTED, draw, page, read_reports

RESULTS = Path(__file__).parents[3] / "bench" / "results"


def report(name: str, aims: list[Aim]) -> Report:
    return Report(name, f"python -m bench.{name}", {"cores": 2}, {"python": "3.11"}, {}, aims)


def test_the_page_has_every_aim_and_says_what_is_missing() -> None:
    aims = [Aim.of("us per token", 36.6, 40, "lower"), Aim.of("GB/s", 3.0, 4.0, "higher")]
    text = page({"proxy_cpu": report("proxy_cpu", aims)}, {"grammar": "exit code 1, see grammar.log"}, {}, "Benchmarks")
    assert "| us per token | 36.6 | at most 40 | yes |" in text
    assert "| GB/s | 3 | at least 4 | no |" in text
    assert "| [proxy_cpu](#proxy_cpu) | 1 of 2 | `python -m bench.proxy_cpu` |" in text
    assert "| grammar | did not run: exit code 1, see grammar.log |" in text
    assert text.count("not measured here") == len(REPORTED)
    assert "cores 2" in text and "python 3.11" in text


def test_the_kept_results_make_a_page(tmp_path: Path) -> None:
    reports = read_reports(RESULTS)
    plots = draw({name: reports[name] for name in ("pd_study", "proxy_cpu")}, tmp_path / "plots")
    assert plots == {"pd_study": "plots/pd_study.png", "proxy_cpu": "plots/proxy_cpu.png"}
    assert all((tmp_path / file).read_bytes().startswith(b"\x89PNG") for file in plots.values())
    text = page(reports, {}, plots, "Benchmarks")
    assert "tokenizer threads, completions: p50" in text
    assert "![pd_study](plots/pd_study.png)" in text


def test_a_file_that_is_no_report_is_named(tmp_path: Path) -> None:
    (tmp_path / "odd.json").write_text('{"figures": 3}')
    with pytest.raises(SystemExit, match=r"odd\.json is no benchmark's report"):
        read_reports(tmp_path)
