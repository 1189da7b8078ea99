"""Reads the Grafana dashboards of the repository."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "deploy/grafana/dashboards"


def dashboards() -> dict[str, Any]:
    """Returns the dashboards of the repository by uid, as Grafana exports them."""
    found = [json.loads(file.read_text()) for file in sorted(FOLDER.glob("*.json"))]
    return {dashboard["uid"]: dashboard for dashboard in found}


def queries() -> list[tuple[str, str, str]]:
    """Returns (dashboard, panel, PromQL expression) of every query."""
    return [
        (dashboard["title"], panel["title"], target["expr"])
        for dashboard in dashboards().values()
        for panel in dashboard["panels"]
        for target in panel.get("targets", [])
    ]
