"""Reads the values of `--engine-arg NAME=VALUE` by vLLM's own parser, whose types and choices decide what is valid."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Sequence
from typing import Any, NoReturn

import msgspec
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from tandem.runtime.errors import ConfigError
from tandem.vllm_worker.engine_args import split_argument
from tandem.vllm_worker.versions import installed_version

_BOOLEANS = {"true": "--", "1": "--", "false": "--no-", "0": "--no-"}
"""Beginnings of the flag by value: vLLM's flags of switches take no value."""


class _Parser(FlexibleArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"engine_arg: vLLM refuses it: {message}")


def parsed_args(given: Sequence[str]) -> dict[str, Any]:
    """Returns values for `EngineArgs` by name. Raises ConfigError, in one line that names the argument.

    A list is JSON, or words between commas.
    """
    if not given:
        return {}
    fields = {each.name: str(each.type) for each in dataclasses.fields(EngineArgs)}
    names, words = set[str](), []
    for each in given:
        name, key, value = split_argument(each)
        if name not in fields:
            near = difflib.get_close_matches(name, fields, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"engine_arg: vLLM {installed_version()} has no engine argument {name}{hint}")
        names.add(name)
        flag = name.replace("_", "-")
        if not key and "bool" in fields[name] and (beginning := _BOOLEANS.get(value.lower())):
            words.append(beginning + flag)
        elif not key and ("list[" in fields[name] or "set[" in fields[name]):
            words += [f"--{flag}", *_items(name, value)]
        else:
            words.append(f"--{flag}{key}={value}")
    parser = EngineArgs.add_cli_args(_Parser(allow_abbrev=False))
    try:
        found = parser.parse_args(words)
    except ValueError as error:
        raise ConfigError(f"engine_arg: vLLM refuses it: {error}") from error
    return {name: getattr(found, name) for name in names}


def _items(name: str, value: str) -> list[str]:
    if not value.startswith("["):
        return value.split(",")
    try:
        return [str(each) for each in msgspec.json.decode(value, type=list[str | int | float])]
    except msgspec.DecodeError as error:
        raise ConfigError(f"engine_arg: {name} is not a list in JSON: {error}") from error
