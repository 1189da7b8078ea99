"""The demo model that comes with the package. It is trained by `tools.demo_model.train`."""

from __future__ import annotations

from pathlib import Path

DEMO_MODEL = Path(__file__).parent / "files"
"""Weights, config, tokeniser and chat template."""
