"""Tells errors of loading that would come again from those that another try may not meet. Pure.

The former stop the cluster; after the latter the worker is started again. vLLM and what it uses raise undocumented
types: a wrong setting or an unknown model is a ValueError or one like it; a GPU without memory is a RuntimeError, or a
ValueError that speaks of free memory; a failed download is an OSError.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

from tandem.runtime.errors import ConfigError, InternalError, TandemError, first_line

_MAX_REASON_CHARACTERS = 400
_CERTAIN = (
    ConfigError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ImportError,
    NotImplementedError,
)
_UNCERTAIN = (OSError, RuntimeError, MemoryError, EOFError)
_NOT_THERE = frozenset(
    {"RepositoryNotFoundError", "GatedRepoError", "RevisionNotFoundError", "RemoteEntryNotFoundError"}
)
"""Answers of the hub that do not depend on the network. Their types are OSErrors too."""
_OF_BUSY_DEVICES = ("free memory", "out of memory")


def load_error(error: BaseException) -> TandemError:
    """Returns a ConfigError if loading would fail again in the same way, else an InternalError; with vLLM's reason."""
    if isinstance(error, ConfigError):
        return error
    if is_certain(error):
        return ConfigError(f"vLLM refused the model or its settings: {_reason(error)}")
    return InternalError(f"vLLM could not load the model: {_reason(error)}")


def is_certain(error: BaseException) -> bool:
    """Whether another try fails in the same way, as far as the types and texts of the error and its causes tell."""
    chain = list(_causes(error))
    if any(type(each).__name__ in _NOT_THERE for each in chain):
        return True
    if any(isinstance(each, _UNCERTAIN) and not isinstance(each, NotImplementedError) for each in chain):
        return False
    if any(mark in str(each).lower() for each in chain for mark in _OF_BUSY_DEVICES):
        return False
    return isinstance(error, _CERTAIN)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yields the error and what it was raised from. Pydantic's ValidationError has causes in its details."""
    seen: set[int] = set()
    pending: list[object] = [error]
    for each in pending:  # grows
        if isinstance(each, BaseException) and id(each) not in seen:
            seen.add(id(each))
            yield each
            pending.append(each.__cause__)
            pending += (detail.get("ctx", {}).get("error") for detail in _details(each))


def _details(error: BaseException) -> list[dict[str, Any]]:
    """Returns the details of pydantic's ValidationError; none of another error."""
    return error.errors() if hasattr(error, "errors") and type(error).__name__ == "ValidationError" else []


def _reason(error: BaseException) -> str:
    """vLLM's reason in one line. Some list every model that it knows."""
    reason = first_line(error)
    if details := _details(error):  # the first line says how many reasons follow
        reason = "; ".join(str(each["msg"]).removeprefix("Value error, ") for each in details)
    return textwrap.shorten(reason, _MAX_REASON_CHARACTERS)
