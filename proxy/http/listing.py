"""Pages of lists, as OpenAI's clients ask for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
from starlette.requests import Request

from tandem.runtime.errors import InvalidRequest

MAX_LISTED = 10_000
MAX_PAGE_BYTES = 4 << 20
"""Size at which a page ends early, after its first object. `has_more` then says that more follow."""


class Page(msgspec.Struct, frozen=True, kw_only=True):
    """What `page` returns, beside its `data`."""

    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


@dataclass(frozen=True, slots=True)
class PageQuery:
    limit: int
    is_newest_first: bool
    after: str | None  # id of the last object of the page before

    @classmethod
    def of(cls, request: Request) -> PageQuery:
        """Reads `after`, `limit` and `order`; an empty value counts as none. Raises InvalidRequest."""
        given = request.query_params.get("limit") or "20"
        limit = int(given) if given.isdecimal() and len(given) < 6 else 0
        if not 1 <= limit <= MAX_LISTED:
            raise InvalidRequest(f"limit must be a number from 1 to {MAX_LISTED}, not {given[:20]!r}.", "limit")
        order = request.query_params.get("order") or "desc"
        if order not in ("asc", "desc"):
            raise InvalidRequest(f"order must be 'asc' (oldest first) or 'desc', not {order[:20]!r}.", "order")
        return cls(limit, order == "desc", request.query_params.get("after") or None)


def page(query: PageQuery, oldest_first: Sequence[str], load: Callable[[int], bytes | None]) -> bytes:
    """Returns the JSON of a page: the objects, the ids of the first and the last one, and whether more follow.

    oldest_first: ids of all objects. load: returns an object as JSON by its place in them, or None to leave it out.
    Only the page's own objects are loaded, and the next one. Raises InvalidRequest.
    """
    places = range(len(oldest_first))
    if query.is_newest_first:
        places = places[::-1]
    if query.after is not None:
        try:
            found = oldest_first.index(query.after)
        except ValueError:
            raise InvalidRequest(f"after names nothing in the list: {query.after[:100]!r}.", "after") from None
        places = places[places.index(found) + 1 :]
    listed: list[bytes] = []
    ids: list[str] = []
    num_bytes, has_more = 0, False
    for place in places:
        if (encoded := load(place)) is None:
            continue
        if len(listed) == query.limit or (listed and num_bytes + len(encoded) > MAX_PAGE_BYTES):
            has_more = True
            break
        listed.append(encoded)
        ids.append(oldest_first[place])
        num_bytes += len(encoded)
    ends = (ids[0], ids[-1]) if ids else (None, None)
    rest = msgspec.json.encode(Page(first_id=ends[0], last_id=ends[1], has_more=has_more))
    return b'{"data":[' + b",".join(listed) + b"]," + rest[1:]
