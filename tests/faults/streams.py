"""A streamed request on its own thread: its tokens with their arrival times, and its outcome."""

from __future__ import annotations

import json
import secrets
import socket
import threading
import time
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx

from tests.support.cluster import Cluster
from tests.support.sse import events_of

READ_TIMEOUT_S = 240.0
POLL_S = 0.005


class Stream:
    """Starts at once, with one sequence. body: of a completion if it has a prompt, else of a chat.

    proxy_pid: process at the other end of the connection. outcome: a finish_reason, an error code, or "connection
    ended"; empty while running. arrivals: monotonic time of each event. num_ends: terminal messages received; must be
    one.
    """

    def __init__(self, cluster: Cluster, body: dict[str, Any], not_on: int = 0) -> None:
        """not_on: process id of a proxy to avoid."""
        self.request_id = f"case-{secrets.token_hex(6)}"
        self.token_ids: list[int] = []
        self.arrivals: list[float] = []
        self.outcome = ""
        self.num_ends = 0
        self._body = body
        self._path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
        self._client, self._socket, self.proxy_pid = connect(cluster, not_on)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def has_ended(self) -> bool:
        return bool(self.outcome)

    def wait(self, timeout_s: float) -> bool:
        """Returns whether the stream ended within the time."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def abandon(self) -> None:
        """Disconnects at once."""
        self._socket.shutdown(socket.SHUT_RDWR)

    def longest_pause_s(self, since: float, now: float) -> float:
        """Returns the longest time without an event, from `since` to the end, or to `now` while running."""
        moments = [since, *(moment for moment in self.arrivals if moment > since)]
        if not self.has_ended:
            moments.append(now)
        return max((after - before for before, after in pairwise(moments)), default=0.0)

    def _run(self) -> None:
        try:
            with closing(self._client):
                outcome = self._read()
        except httpx.TimeoutException:
            outcome = "silence"
        except httpx.TransportError:
            outcome = "connection ended"
        self.arrivals.append(time.monotonic())
        self.outcome = outcome

    def _read(self) -> str:
        outcome, headers = "", {"x-request-id": self.request_id}
        with self._client.stream("POST", self._path, json={**self._body, "stream": True}, headers=headers) as answer:
            if answer.status_code != 200:
                self.num_ends += 1
                return str(json.loads(answer.read())["error"]["code"])
            for event in events_of(answer.iter_lines()):
                self.arrivals.append(time.monotonic())
                if "error" in event:
                    outcome = str(event["error"]["code"])
                    self.num_ends += 1
                for choice in event.get("choices", []):
                    self.token_ids += choice.get("token_ids") or []
                    if choice["finish_reason"]:
                        outcome = choice["finish_reason"]
                        self.num_ends += 1
        return outcome or "connection ended"


def connect(cluster: Cluster, not_on: int = 0) -> tuple[httpx.Client, socket.socket, int]:
    """Returns a client with one open connection, its socket, and the process id of the proxy at its other end."""
    for _ in range(60):  # the kernel chooses a proxy
        client = httpx.Client(base_url=cluster.url, timeout=READ_TIMEOUT_S, limits=httpx.Limits(max_connections=1))
        answer = client.get("/health")
        connection = answer.extensions["network_stream"].get_extra_info("socket")
        pid = proxy_of_connection(cluster, connection.getsockname()[1])
        if pid != not_on:
            return client, connection, pid
        client.close()
    raise AssertionError("no connection led to another proxy")


def proxy_of_connection(cluster: Cluster, client_port: int) -> int:
    wanted = f"{cluster.port:04X}", f"{client_port:04X}"
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, remote, *rest = line.split()
        if (local.rpartition(":")[2], remote.rpartition(":")[2]) == wanted:
            socket_name = f"socket:[{rest[6]}]"
            for pid in cluster.pids():
                if socket_name in open_files(pid):
                    return pid
    raise AssertionError(f"nobody has the connection from port {client_port}")


def open_files(pid: int) -> list[str]:
    """Returns the targets of the process's descriptors. Empty if the process has ended."""
    names = []
    try:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            try:
                names.append(str(link.readlink()))
            except OSError:
                continue
    except OSError:
        return []
    return names
