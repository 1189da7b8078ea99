"""Grafana dashboards as code; `python -m tandem.deploy.grafana.dashboards` writes their JSON beside this file.

Panels are laid out in rows of equal width. Queries use the names of docs/observing.md; a test runs each of them on a
real Prometheus.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Json = dict[str, Any]

FOLDER = Path(__file__).parent / "dashboards"
_RATE = "[$__rate_interval]"
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_HEIGHT, _WIDTH = 8, 24


@dataclass(frozen=True)
class Query:
    expr: str
    legend: str = ""


@dataclass(frozen=True)
class Panel:
    """kind: timeseries, stat or heatmap. unit: as Grafana names it."""

    title: str
    queries: list[Query]
    unit: str = "short"
    description: str = ""
    kind: str = "timeseries"
    is_stacked: bool = False


@dataclass(frozen=True)
class Dashboard:
    """rows: panels beside each other. variables: Grafana's, beside the data source."""

    uid: str
    title: str
    rows: list[list[Panel]]
    variables: list[Json] = field(default_factory=list)

    def panels(self) -> list[Panel]:
        return [panel for row in self.rows for panel in row]

    def to_json(self) -> Json:
        panels, number, top = [], 0, 0
        for row in self.rows:
            width = _WIDTH // len(row)
            for column, panel in enumerate(row):
                number += 1
                place = {"x": column * width, "y": top, "w": width, "h": _HEIGHT}
                panels.append(_panel_json(panel, number, place))
            top += _HEIGHT
        source: Json = {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"}
        return {
            "uid": self.uid,
            "title": self.title,
            "tags": ["tandem"],
            "schemaVersion": 39,
            "editable": False,
            "refresh": "10s",
            "time": {"from": "now-30m", "to": "now"},
            "timezone": "browser",
            "templating": {"list": [source, *self.variables]},
            "links": [{"type": "dashboards", "tags": ["tandem"], "title": "Tandem", "asDropdown": True}],
            "panels": panels,
        }


def _panel_json(panel: Panel, number: int, place: Json) -> Json:
    custom: Json = {"fillOpacity": 60 if panel.is_stacked else 8, "lineWidth": 2, "showPoints": "never"}
    if panel.is_stacked:
        custom["stacking"] = {"mode": "normal"}
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": _SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, "custom": custom}, "overrides": []},
        "options": {"legend": {"displayMode": "table", "calcs": ["lastNotNull", "max"]}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(65 + i), "datasource": _SOURCE, "expr": query.expr, "legendFormat": query.legend}
            for i, query in enumerate(panel.queries)
        ],
    }


def _quantiles(name: str, by: str = "", where: str = "") -> list[Query]:
    legend = "".join(f" {{{{{label}}}}}" for label in by.split(",") if label)
    group = f"le,{by}" if by else "le"
    return [
        Query(f"histogram_quantile({q}, sum by ({group}) (rate({name}_bucket{where}{_RATE})))", f"p{100 * q:g}{legend}")
        for q in (0.5, 0.9, 0.99)
    ]


def _rate(name: str, by: str = "", where: str = "") -> str:
    return f"sum by ({by}) (rate({name}{where}{_RATE}))" if by else f"sum(rate({name}{where}{_RATE}))"


def _custom(name: str, label: str, values: list[str], chosen: str) -> Json:
    options = [{"text": value, "value": value, "selected": value == chosen} for value in values]
    return {
        "name": name, "label": label, "type": "custom", "query": ",".join(values), "options": options,
        "current": {"text": chosen, "value": chosen},
    }  # fmt: skip


_STAGES = (
    "tokenize", "dispatch", "queue", "prefill", "reserve", "transfer", "decode_wait", "decode", "detokenize",
    "interrupted",
)  # fmt: skip

OVERVIEW = Dashboard(
    "tandem-overview",
    "Tandem / Overview",
    [
        [
            Panel("TTFT", _quantiles("tandem_time_to_first_token_seconds"), "s", "Arrival to the first token."),
            Panel("ITL", _quantiles("tandem_inter_token_latency_seconds"), "s", "Between two messages of tokens."),
            Panel("E2E", _quantiles("tandem_e2e_request_latency_seconds"), "s", "Arrival to the last piece of text."),
        ],
        [
            Panel(
                "Goodput: sequences within their SLO",
                [
                    Query(
                        f'sum(rate(tandem_time_to_first_token_seconds_bucket{{le="$ttft_slo"}}{_RATE}))',
                        "TTFT within ${ttft_slo} s",
                    ),
                    Query(
                        f'sum(rate(tandem_request_time_per_output_token_seconds_bucket{{le="$tpot_slo"}}{_RATE}))',
                        "TPOT within ${tpot_slo} s",
                    ),
                    Query(_rate("tandem_e2e_request_latency_seconds_count"), "finished"),
                ],
                "reqps",
                "Per second. Sequences of one token have no TPOT.",
            ),
            Panel(
                "Tokens",
                [
                    Query(_rate("tandem_generation_tokens_total"), "generated"),
                    Query(_rate("tandem_prompt_tokens_total"), "prompt"),
                    Query(_rate("tandem_cached_prompt_tokens_total"), "prompt, cached"),
                ],
                "short",
                "Per second.",
            ),
        ],
        [
            Panel(
                "Where the time goes",
                [
                    Query(
                        f"{_rate(f'tandem_request_{stage}_time_seconds_sum')}"
                        f" / {_rate(f'tandem_request_{stage}_time_seconds_count')}",
                        stage,
                    )
                    for stage in _STAGES
                ],
                "s",
                "Mean of each stage; together they are E2E.",
                is_stacked=True,
            ),
        ],
        [
            Panel("Ends", [Query(_rate("tandem_requests_total", "outcome"), "{{outcome}}")], "reqps"),
            Panel("Refused", [Query(_rate("tandem_rejections_total", "reason"), "{{reason}}")], "reqps"),
            Panel(
                "Requests",
                [
                    Query("sum(tandem_num_requests_running)", "running"),
                    Query("sum(tandem_num_requests_waiting)", "wait for a first token"),
                ],
            ),
        ],
    ],
    [
        _custom("ttft_slo", "TTFT SLO, s", ["0.1", "0.25", "0.5", "1.0", "2.5", "5.0"], "1.0"),
        _custom("tpot_slo", "TPOT SLO, s", ["0.02", "0.03", "0.05", "0.075", "0.1", "0.2"], "0.1"),
    ],
)

BALANCE = Dashboard(
    "tandem-balance",
    "Tandem / Prefill and decode",
    [
        [
            Panel(
                "Steps: share of the time that workers compute",
                [Query(f"avg by (role) (rate(tandem_worker_step_seconds_sum{_RATE}))", "{{role}}")],
                "percentunit",
                "The side that is nearer to 1 wants more workers.",
            ),
            Panel(
                "KV use",
                [Query("avg by (role) (tandem_worker_kv_cache_usage_perc)", "{{role}}")],
                "percentunit",
            ),
            Panel("Workers", [Query("max by (role) (tandem_workers)", "{{role}}")]),
        ],
        [
            Panel(
                "Waiting",
                [
                    Query("sum by (role) (tandem_worker_num_requests_waiting)", "sequences, {{role}}"),
                    Query("sum by (role) (tandem_worker_num_waiting_tokens)", "prompt tokens, {{role}}"),
                ],
            ),
            Panel(
                "Time lost to each side",
                [
                    Query(_rate("tandem_request_queue_time_seconds_sum"), "queue: prefill is short"),
                    Query(_rate("tandem_request_reserve_time_seconds_sum"), "reserve: decode has no room"),
                    Query(_rate("tandem_request_decode_wait_time_seconds_sum"), "decode_wait: decode's steps"),
                    Query(_rate("tandem_request_interrupted_time_seconds_sum"), "interrupted: preempted or lost"),
                ],
                "short",
                "Seconds of requests per second.",
            ),
            Panel(
                "Tokens computed",
                [
                    Query(_rate("tandem_worker_prefix_cache_queries_total", "role"), "prompt, {{role}}"),
                    Query(_rate("tandem_worker_prefix_cache_hits_total", "role"), "of these cached, {{role}}"),
                    Query(_rate("tandem_generation_tokens_total"), "generated"),
                ],
                "short",
                "Per second.",
            ),
        ],
    ],
)

TRANSFER = Dashboard(
    "tandem-transfer",
    "Tandem / KV transfer",
    [
        [
            Panel(
                "Bytes per pair",
                [
                    Query(
                        _rate("tandem_kv_transfer_bytes_total", "prefill_worker,decode_worker,connector"),
                        "{{prefill_worker}} to {{decode_worker}} ({{connector}})",
                    )
                ],
                "Bps",
            ),
            Panel(
                "Bandwidth while blocks move",
                [
                    Query(
                        f"{_rate('tandem_kv_transfer_bytes_total', 'prefill_worker,decode_worker')}"
                        f" / {_rate('tandem_kv_transfer_seconds_sum', 'prefill_worker,decode_worker')}",
                        "{{prefill_worker}} to {{decode_worker}}",
                    )
                ],
                "Bps",
                "Bytes over the seconds that the connector had them.",
            ),
        ],
        [
            Panel("One shipment", _quantiles("tandem_kv_transfer_seconds", "connector"), "s"),
            Panel(
                "What clients wait for it",
                _quantiles("tandem_request_transfer_time_seconds"),
                "s",
                "From the first token to the KV being whole on decode.",
            ),
        ],
        [
            Panel(
                "Shipments", [Query(_rate("tandem_kv_transfer_seconds_count", "prefill_worker"), "{{prefill_worker}}")]
            ),
            Panel("Blocks in quarantine", [Query("tandem_worker_kv_quarantined_blocks", "{{worker}}")]),
            Panel("Blocks that were not what was sent", [Query("tandem_worker_kv_corrupt_blocks_total", "{{worker}}")]),
        ],
    ],
)

_WORKER = '{worker=~"$worker"}'
_WORKERS: Json = {
    "name": "worker", "label": "Worker", "type": "query", "datasource": _SOURCE, "refresh": 2, "multi": True,
    "includeAll": True, "allValue": ".+", "current": {"text": "All", "value": "$__all"},
    "query": "label_values(tandem_worker_kv_blocks, worker)",
}  # fmt: skip
WORKERS = Dashboard(
    "tandem-workers",
    "Tandem / Workers",
    [
        [
            Panel("Running", [Query(f"tandem_worker_num_requests_running{_WORKER}", "{{worker}}")]),
            Panel("Waiting", [Query(f"tandem_worker_num_requests_waiting{_WORKER}", "{{worker}}")]),
            Panel("KV use", [Query(f"tandem_worker_kv_cache_usage_perc{_WORKER}", "{{worker}}")], "percentunit"),
        ],
        [
            Panel("Step", _quantiles("tandem_worker_step_seconds", "worker", _WORKER), "s"),
            Panel(
                "Queue", _quantiles("tandem_worker_request_queue_time_seconds", "worker", '{worker=~"$worker"}'), "s"
            ),
            Panel(
                "Prefix cache hits",
                [
                    Query(
                        f"{_rate('tandem_worker_prefix_cache_hits_total', 'worker', _WORKER)}"
                        f" / {_rate('tandem_worker_prefix_cache_queries_total', 'worker', _WORKER)}",
                        "{{worker}}",
                    )
                ],
                "percentunit",
            ),
        ],
        [
            Panel(
                "Sequences done", [Query(_rate("tandem_worker_request_success_total", "worker", _WORKER), "{{worker}}")]
            ),
            Panel(
                "Preemptions", [Query(_rate("tandem_worker_num_preemptions_total", "worker", _WORKER), "{{worker}}")]
            ),
            Panel("Restarts", [Query("max by (worker) (tandem_worker_restarts)", "{{worker}}")]),
        ],
        [
            Panel(
                "Processor", [Query(f"rate(process_cpu_seconds_total{_WORKER}{_RATE})", "{{worker}}")], "percentunit"
            ),
            Panel("Memory", [Query(f"process_resident_memory_bytes{_WORKER}", "{{worker}}")], "bytes"),
            Panel("Up", [Query(f"up{_WORKER}", "{{worker}}")]),
        ],
    ],
    [_WORKERS],
)

DASHBOARDS = (OVERVIEW, BALANCE, TRANSFER, WORKERS)


def rendered(dashboard: Dashboard) -> str:
    return json.dumps(dashboard.to_json(), indent=1) + "\n"


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for dashboard in DASHBOARDS:
        (FOLDER / f"{dashboard.uid}.json").write_text(rendered(dashboard))


if __name__ == "__main__":
    main()
