"""The client that attacks, and what an attack may cost the second tenant."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx

from tests.support.cluster import MODEL, Cluster

TIMEOUT_S = 30.0
"""Of each request of an attack. One that waits longer has failed to be bounded."""


@dataclass(frozen=True)
class Attacker:
    """One client of the cluster. folder: on the server's host, for what an operator's call may name."""

    cluster: Cluster
    key: str
    folder: Path

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.key}", "content-type": "application/json"}

    def send(
        self,
        path: str,
        body: bytes | dict[str, Any] | None = None,
        timeout_s: float = TIMEOUT_S,
        more: Mapping[str, str] = MappingProxyType({}),
    ) -> httpx.Response | None:
        """Returns the answer, or None if there is none: the attack goes on all the same. more: headers."""
        headers = self.headers | dict(more)
        content = json.dumps(body).encode() if isinstance(body, dict) else body
        try:
            method = "GET" if content is None else "POST"
            return httpx.request(method, self.cluster.url + path, content=content, headers=headers, timeout=timeout_s)
        except httpx.HTTPError:
            return None

    def send_all(self, path: str, bodies: Iterable[bytes | dict[str, Any] | None], at_once: int = 8) -> None:
        with ThreadPoolExecutor(at_once) as threads:
            list(threads.map(lambda body: self.send(path, body), bodies))

    def complete(self, **fields: Any) -> dict[str, Any]:
        return {"model": MODEL, "prompt": "a", "max_tokens": 4, "timeout": 10, **fields}

    def with_grammars(self, grammars: Iterable[str], at_once: int = 4) -> None:
        bodies = (self.complete(structured_outputs={"grammar": grammar}) for grammar in grammars)
        self.send_all("/v1/completions", bodies, at_once)

    def with_schemas(self, schemas: Iterable[dict[str, Any] | str], at_once: int = 4) -> None:
        bodies = (self.complete(structured_outputs={"json": schema}) for schema in schemas)
        self.send_all("/v1/completions", bodies, at_once)


@dataclass(frozen=True)
class Attack:
    """Work of one client, and what it may cost the second tenant and the server.

    max_gap_s: of the tenant's stream; about eight times what two cores need that do nothing else. max_batch_s: for each
    of its batches, whose lines come after all other requests. max_grown_bytes: by how much all processes of the server
    may grow.
    """

    run: Callable[[Attacker], object]
    max_gap_s: float = 4.0
    max_batch_s: float = 30.0
    max_grown_bytes: int = 400 << 20

    @property
    def name(self) -> str:
        return self.run.__name__
