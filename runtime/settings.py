"""Fields of configuration structs that are settings of the operator: flags of `tandem up` and keys of its file.

A setting is a field of the struct of the part that uses it. `deploy.cluster_config` collects these structs and makes
the command line of them; processes get them whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeVar

import msgspec
from msgspec import Meta

T = TypeVar("T", bound=msgspec.Struct)

Group = Literal["model", "workers", "KV cache", "HTTP", "media", "limits", "multi-host", "autoscaling", "logging"]
"""Headings under which `tandem up --help` and docs/configuration.md list the settings, in their order."""


def setting(group: Group, description: str, **limits: Any) -> Meta:
    """Marks a field as a setting. limits: of its value, see `msgspec.Meta`."""
    return Meta(description=description, extra={"group": group}, **limits)


def with_values(config: T, values: Mapping[str, Any]) -> T:
    """Returns a struct with other values, not checked. Fields of nested structs are given by their names alone.

    Raises TypeError for a name that neither the struct nor a nested one has.
    """
    rest = dict(values)
    changes = {name: rest.pop(name) for name in config.__struct_fields__ if name in rest}
    for name in config.__struct_fields__:
        nested = getattr(config, name)
        if isinstance(nested, msgspec.Struct) and name not in changes:
            own = {each: rest.pop(each) for each in nested.__struct_fields__ if each in rest}
            changes[name] = msgspec.structs.replace(nested, **own)
    return msgspec.structs.replace(config, **changes, **rest)
