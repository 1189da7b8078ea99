"""Messages between rank 0 of a worker and a follower rank about the follower's KV transfers."""

from __future__ import annotations

from typing import Any

import msgspec


class PoolReady(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Follower to rank 0, once: its pool is allocated."""


class Order(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Rank 0 to follower. name: in the table of `transfer_server.TransferServer`. Answered by one OrderDone."""

    job_id: int
    name: str
    args: list[Any]


class OrderDone(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Follower to rank 0. error: None on success. is_refused: the error is a KVPathRefused."""

    job_id: int
    result: Any = None
    error: str | None = None
    is_refused: bool = False
