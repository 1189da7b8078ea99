"""Pages of lists, as OpenAI's clients ask for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from starlette.requests import Request

from tandem.runtime.errors import InvalidRequest

MAX_LISTED = 10_000


class Listed(Protocol):
    @property
    def id(self) -> str | None: ...


T = TypeVar("T", bound=Listed)


def page(request: Request, newest_first: Sequence[T]) -> tuple[list[T], str | None, str | None, bool]:
    """Returns the part of a list that `after`, `limit` and `order` ask for, its first and last id, and whether more
    follow. Raises InvalidRequest.
    """
    given = request.query_params.get("limit", "20")
    limit = int(given) if given.isdecimal() and len(given) < 6 else 0
    if not 1 <= limit <= MAX_LISTED:
        raise InvalidRequest(f"limit must be a number from 1 to {MAX_LISTED}, not {given[:20]!r}.", "limit")
    order = request.query_params.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequest(f"order must be 'asc' (oldest first) or 'desc', not {order[:20]!r}.", "order")
    found = newest_first if order == "desc" else newest_first[::-1]
    ids = [each.id for each in found]
    after = request.query_params.get("after")
    if after is not None and after not in ids:
        raise InvalidRequest(f"after names nothing in the list: {after[:100]!r}.", "after")
    start = 0 if after is None else ids.index(after) + 1
    part = list(found[start : start + limit])
    return part, part[0].id if part else None, part[-1].id if part else None, start + limit < len(found)
