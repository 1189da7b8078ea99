"""The page at /dashboard draws roles, placements and predictions. A browser loads it with figures made here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from tandem.protocol.messages.membership import PairStatus, Role, TierFigures, WorkerInfo, WorkerLoad, WorkerReport
from tandem.proxy.http.routes.admin import ClusterState
from tandem.telemetry.proxy_metrics import ProxyMetrics
from tandem.telemetry.request_log import SequenceTimer
from tandem.telemetry.stages import AttemptTimes, Placement
from tests.integration.test_observing import chromium

PAGE = Path(__file__).parents[2] / "proxy/http/routes/dashboard.html"
ADDRESS = "http://tandem.test"
ROLES: dict[str, Role] = {"prefill-0": "prefill", "worker-0": "any", "worker-1": "decode"}
RAN: list[Placement] = ["same", "same", "two", "deflected"]


def cluster() -> bytes:
    """The last worker was elastic when it opened its pairs, which stay open in role decode. It does not answer."""
    reports = []
    for worker_id, role in ROLES.items():
        peers = [peer for peer, other in ROLES.items() if peer != worker_id and other != "prefill"]
        reports.append(
            WorkerReport(
                WorkerInfo(worker_id, f"{worker_id}/1", role, "ipc://w", 7),
                WorkerLoad(num_blocks=8, num_free_blocks=2, num_role_changes=2 * (worker_id == "worker-1")),
                [PairStatus(peer, f"{peer}/1", "ready", "ipc") for peer in peers],
                0.1,
                unanswered_s=6.0 if worker_id == "worker-1" else None,
            )
        )
    return msgspec.json.encode(ClusterState("m", True, "", reports))


def play(metrics: ProxyMetrics, placement: Placement) -> None:
    attempt = AttemptTimes(10.0, placement=placement, predicted_ttft_s=0.2, predicted_itl_s=0.03)
    timer = SequenceTimer(metrics, 10.0, [attempt])
    for now in (10.3, 10.35, 10.4):
        timer.on_tokens(now, 1)
    timer.on_finished(10.4)
    metrics.per_token.flush()


def test_the_page_shows_roles_placements_and_predictions() -> None:
    metrics = ProxyMetrics()

    def answer(route: Any) -> None:
        match route.request.url.removeprefix(ADDRESS):
            case "/dashboard":
                route.fulfill(path=PAGE, content_type="text/html")
            case "/metrics":
                for placement in RAN:
                    play(metrics, placement)
                route.fulfill(body=metrics.render(), content_type="text/plain")
            case _:
                route.fulfill(body=cluster(), content_type="application/json")

    with chromium() as browser:
        page = browser.new_page(viewport={"width": 1200, "height": 900})
        troubles: list[str] = []
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.route("**/*", answer)
        page.goto(f"{ADDRESS}/dashboard")
        page.wait_for_function("Number(document.body.dataset.turns) >= 2", timeout=30_000)
        page.wait_for_selector("#placements i:nth-child(3)", timeout=30_000)
        legend = page.inner_text("#placement-legend").split("\n")
        counts = dict(zip(legend[::2], map(int, legend[1::2]), strict=True))
        assert counts["prefill only"] == 0 < counts["two workers"] == counts["decode worker"]
        assert counts["one worker"] == 2 * counts["two workers"]
        ttft, itl, *_ = page.locator("#tiles .card").all_inner_texts()
        for tile, means in ((ttft, ("200 ms", "300 ms", "100 ms")), (itl, ("30 ms", "50 ms", "20 ms"))):
            lines = tile.split("\n")
            shown = [lines[lines.index(f"mean {name}") + 1] for name in ("predicted", "measured", "error")]
            assert shown == list(means)
        rows = [row.split() for row in page.locator("#workers tbody tr").all_inner_texts()]
        assert [(row[0], row[3], row[4]) for row in rows] == [
            ("prefill-0", "prefill", "0"), ("worker-0", "any", "0"), ("worker-1", "decode", "2"),
        ]  # fmt: skip
        reported = page.locator("#workers tbody tr td:last-child").all_inner_texts()
        assert reported == ["0.1 s ago", "0.1 s ago", "0.1 s ago, no answer"]
        assert page.locator("#workers tbody .dot.bad").count() == 1
        # prefill-0 ships to both others, worker-0 to worker-1. One dashed line joins both sides of worker-0.
        assert page.locator("#topology line").count() == 4
        assert page.locator("#topology line[stroke-dasharray]").count() == 1
        stages = page.locator("#stages").bounding_box()
        last = page.locator("#stages i").last.bounding_box()
        assert stages and last and last["x"] + last["width"] == pytest.approx(stages["x"] + stages["width"], abs=2)
        assert page.locator("#workers th").count() == 11, "without tiers there are no columns for them"
        assert not troubles


def test_the_page_shows_tiers_of_workers_that_have_some() -> None:
    host, disk = TierFigures("host", 2, 3 << 20, 8 << 20), TierFigures("disk", 5, error="No space left on device")
    load = WorkerLoad(num_prompt_tokens=8, num_cached_tokens=4, num_loaded_tokens=2, tiers=[host, disk])
    reports = [
        WorkerReport(WorkerInfo("prefill-0", "p", "prefill", "ipc://w", 7, num_ranks=2), load, [], 0.1),
        WorkerReport(WorkerInfo("worker-0", "w", "any", "ipc://w", 8), WorkerLoad(), [], 0.1, engine="tandem 0.1.0"),
    ]

    def answer(route: Any) -> None:
        match route.request.url.removeprefix(ADDRESS):
            case "/dashboard":
                route.fulfill(path=PAGE, content_type="text/html")
            case "/metrics":
                route.fulfill(body=ProxyMetrics().render(), content_type="text/plain")
            case _:
                route.fulfill(body=msgspec.json.encode(ClusterState("m", True, "", reports)))

    with chromium() as browser:
        page = browser.new_page()
        page.route("**/*", answer)
        page.goto(f"{ADDRESS}/dashboard")
        page.wait_for_selector("#workers tbody tr:nth-child(2)", timeout=30_000)
        head = page.locator("#workers th").all_inner_texts()
        rows = [row.all_inner_texts() for row in (page.locator(f"#workers tr:nth-child({n}) td") for n in (1, 2))]
        assert [row[0].endswith("tandem 0.1.0") for row in rows] == [False, True]
        shown = [(row[head.index("loaded from tiers")], row[head.index("KV tiers")].split("\n")) for row in rows]
        assert shown == [("25 %", ["host 6.29 MB / 16.8 MB", "disk 0.00 kB"]), ("–", ["–"])]
        assert page.locator("#workers .bad[title='No space left on device']").count() == 1
