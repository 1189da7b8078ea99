"""Log lines stay lines, and the metrics of a sequence are what their names say."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from telemetry.logs import setup_logging
from telemetry.metrics import ProxyMetrics, SequenceTimer


@pytest.fixture
def root_logger() -> Iterator[logging.Logger]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield root
    root.handlers[:] = handlers
    root.setLevel(level)


def test_a_message_cannot_forge_a_line(root_logger: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("proxy-0", "info")
    logging.getLogger("x").info("a client said %s", "hello\n12:00:00.000 proxy-0 E x: fire")
    logging.getLogger("x").debug("not shown")
    [line] = capsys.readouterr().err.splitlines()
    assert " proxy-0 I x: a client said hello\\n12:00" in line
    with pytest.raises(ValueError, match="loud"):
        setup_logging("proxy-0", "loud")


def test_the_times_of_a_sequence() -> None:
    metrics = ProxyMetrics()
    timer = SequenceTimer(metrics, arrived_at=10.0)
    for now in (10.5, 10.6, 10.9):
        timer.on_tokens(now, 1)
    timer.on_finished()
    timer.close()

    def value(name: str) -> float:
        return float(metrics.registry.get_sample_value(f"tandem_{name}") or 0)

    assert value("time_to_first_token_seconds_sum") == pytest.approx(0.5)
    assert value("inter_token_latency_seconds_sum") == pytest.approx(0.4)
    assert value("request_time_per_output_token_seconds_sum") == pytest.approx(0.2)
    assert value("e2e_request_latency_seconds_sum") == pytest.approx(0.9)
    assert value("generation_tokens_total") == 3


@given(st.lists(st.one_of(st.floats(0, 20), st.sampled_from([0.001, 0.0025, 10.0])), min_size=1))
def test_a_tally_adds_up_to_the_same_as_single_observations(itls_s: list[float]) -> None:
    tallied, single = ProxyMetrics(), ProxyMetrics()
    for number, itl_s in enumerate(itls_s):
        tallied.per_token.on_tokens(number * 0.3, 1, itl_s)  # told in between, too
        single.per_token._itl.observe(itl_s)
        single.generation_tokens.inc()
    tallied.per_token.tell()

    def samples(metrics: ProxyMetrics) -> dict[tuple[str, str], float]:
        families = [metrics.per_token._itl, metrics.generation_tokens]
        found = [s for family in families for metric in family.collect() for s in metric.samples]
        return {(s.name, str(s.labels)): pytest.approx(s.value) for s in found if not s.name.endswith("_created")}

    assert samples(tallied) == samples(single)
