"""Flags of the command line, one for each setting of the operator.

The few that most users need come first. The others are shown by `--help-all`, under the headings of their groups.
"""

from __future__ import annotations

import argparse
import typing
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from tandem.deploy.cluster_config import Setting, flag_name, settings

_VALUES = {
    "lora": "NAME=FOLDER",
    "engine_arg": "NAME=VALUE",
    "speculative_config": "JSON",
    "cors_origin": "ORIGIN",
    "ray": "ADDRESS",
}


def add_settings(
    parser: argparse.ArgumentParser, common: Sequence[str], left_out: Collection[str], show_all: bool
) -> None:
    """Adds `--config` and a flag for each setting, except for those `left_out`.

    common: settings that the help shows first, in this order. show_all: whether the help has the others too.
    """
    offered = {setting.key: setting for setting in settings() if setting.key not in left_out}
    rest = [setting for setting in offered.values() if setting.key not in common]
    first = parser.add_argument_group("common flags" if rest else "flags")
    first.add_argument("--config", type=Path, metavar="FILE", default=None, help="TOML file with the same settings")
    for key in common:
        _add_flag(first, offered[key])
    if rest:
        help_text = "show all flags" if show_all else f"show {len(rest)} more flags"
        first.add_argument("--help-all", action="help", help=help_text)
    groups: dict[str, Any] = {}
    for setting in rest:
        group = groups.get(setting.group) or groups.setdefault(
            setting.group, parser.add_argument_group(setting.group.replace("_", " "))
        )
        _add_flag(group, setting, is_shown=show_all)
    parser.set_defaults(known_flags=list(offered))


def _add_flag(group: Any, setting: Setting, is_shown: bool = True) -> None:
    shown = f"{setting.default:g}" if isinstance(setting.default, float) else setting.default
    default = f" (default: {shown})" if shown not in ("", False, []) else ""
    value = _VALUES.get(setting.key)
    # Flags that are not given stay out of the namespace, so that they do not override the file.
    options: dict[str, Any] = {"default": argparse.SUPPRESS}
    options["help"] = setting.description + default if is_shown else argparse.SUPPRESS
    if setting.kind == list[str]:
        options |= {"action": "append", "metavar": value}
    elif choices := typing.get_args(setting.kind):
        options |= {"choices": choices, "metavar": "|".join(choices)}
    elif setting.kind is bool:
        options["action"] = argparse.BooleanOptionalAction
    else:
        options |= {"type": setting.kind, "metavar": value or {int: "N", float: "X"}.get(setting.kind, "S")}
    if setting.key == "ray":
        options |= {"nargs": "?", "const": "auto"}
    group.add_argument(flag_name(setting.key), **options)


def given_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the settings that were given as flags."""
    known = {each.key for each in settings()}
    return {name: value for name, value in vars(arguments).items() if name in known}
