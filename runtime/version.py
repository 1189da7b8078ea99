"""The version of this program."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

FROM_CHECKOUT = "0+checkout"


def own_version() -> str:
    """The installed distribution's version, or FROM_CHECKOUT where the code runs from a checkout without one."""
    try:
        return version("tandem-serve")
    except PackageNotFoundError:
        return FROM_CHECKOUT
