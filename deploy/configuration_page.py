"""Writes docs/configuration.md from the configuration class: `python -m tandem.deploy.configuration_page`."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from tandem.deploy.cluster_config import flag_name, settings

PAGE = Path(__file__).parents[1] / "docs" / "configuration.md"

_INTRODUCTION = """\
# Configuration

`tandem up` takes these settings as flags or as keys of a TOML file (`--config FILE`), where `-` is written `_`. Flags
override the file. `tandem worker` takes the same ones, except for `--workers`, `--prefill`, `--decode`, `--proxies`,
and `--ray`; `--join` and `--name` are for `tandem worker` only.

`python -m tandem.deploy.configuration_page` generates this page from the settings that
`deploy/cluster_config.py` collects.
"""


def page() -> str:
    sections = [_INTRODUCTION]
    for group, members in groupby(settings(), key=lambda setting: setting.group):
        rows = [
            f"| `{flag_name(each.key)}` | {_shown(each.default)} | {each.description.replace('|', chr(92) + '|')} |"
            for each in members
        ]
        heading = group[0].upper() + group[1:]
        sections.append(
            "\n".join([f"## {heading}", "", "| flag | default | meaning |", "| --- | --- | --- |", *rows, ""])
        )
    return "\n".join(sections)


def _shown(default: object) -> str:
    return "" if default in ("", []) else f"`{str(default).lower() if isinstance(default, bool) else default}`"


if __name__ == "__main__":
    PAGE.write_text(page())
