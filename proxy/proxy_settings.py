"""Settings of a proxy's parts, as the operator sets them: HTTP servers, routing, admission and records of requests.

They stand apart from the parts, because the launcher reads them without loading a router or an HTTP server.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from tandem.proxy.admission.browser_rules import parse_origins
from tandem.runtime.errors import ConfigError
from tandem.runtime.files.private_folder import make_private_folder
from tandem.runtime.settings import setting


class HttpSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of the server for clients and of the one for operators."""

    # fmt: off
    host: Annotated[str, setting("HTTP", "Address on which the HTTP endpoint listens.")] = "127.0.0.1"
    port: Annotated[int, setting("HTTP", "Port of the HTTP endpoint.", ge=1, le=65535)] = 8000
    listen_fd: int | None = None
    """Inherited socket that is bound to host and port; None binds one."""
    api_key: Annotated[str, setting("HTTP", "API key that clients must send; empty allows every client.")] = ""
    api_keys_file: Annotated[str, setting("HTTP", description=
        "File with further API keys, `KEY` or `KEY NAME` on each line; blank lines and lines that begin with # are "
        "ignored. Read again when it changes. Keys of one NAME share limits and cached prefixes.")] = ""
    ssl_certfile: Annotated[str, setting("HTTP", "PEM certificate; the endpoint then serves HTTPS only.")] = ""
    ssl_keyfile: Annotated[str, setting("HTTP", description=
        "PEM private key of --ssl-certfile; empty reads it from the certificate file.")] = ""
    admin_host: Annotated[str, setting("HTTP", description=
        "Address of /metrics, /dashboard and the other admin routes, which need no API key; workers serve "
        "their own /metrics on it too.")] = "127.0.0.1"
    admin_port: Annotated[int, setting("HTTP", ge=0, le=65535, description=
        "Port of the admin routes; 0 uses the port after --port.")] = 0
    """A proxy that is given 0 serves the admin routes on the port of the HTTP endpoint."""
    admin_listen_fd: int | None = None
    """Inherited socket that is bound to the admin address; None binds one."""
    admin_keys_file: Annotated[str, setting("HTTP", description=
        "File with keys, as --api-keys-file, for requests that change something on the admin address (roles, LoRA "
        "adapters). Empty takes them without a key if --admin-host is loopback, and refuses them otherwise. With "
        "--ray, the file must exist on the nodes of proxies.")] = ""
    cors_origin: Annotated[list[str], setting("HTTP", description=
        "Origin of web pages that may use the HTTP endpoint from a browser, as https://HOST[:PORT]; * for all. May be "
        "repeated, or a list separated by commas.")] = []
    max_body_mib: Annotated[int, setting("limits", "Maximum size of a request body in MiB.", ge=1, le=1024)] = 16
    max_connections: Annotated[int, setting("limits", ge=1, description=
        "Maximum number of HTTP connections per proxy, half of them from one address; further ones get 503 "
        "(or 429).")] = 8192
    client_timeout_s: Annotated[float, Meta(gt=0)] = 30.0
    """Time for a request's head, for each 16 KiB of its body, and for the client to read 16 KiB of a held answer."""
    keep_alive_s: Annotated[float, Meta(gt=0)] = 75.0
    """Idle time between two requests of a connection."""
    # fmt: on

    @property
    def address(self) -> tuple[str, int]:
        return self.host, self.port

    @property
    def cors_origins(self) -> list[str]:
        """Raises ConfigError."""
        return parse_origins(self.cors_origin)

    @property
    def needs_api_key(self) -> bool:
        return bool(self.api_key or self.api_keys_file)


class RoutingSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of the worker table, the router and the dispatcher."""

    # fmt: off
    decode_prefill_threshold: Annotated[int, setting("workers", ge=0, le=65536, description=
        "A decode worker prefills prompts of up to this many uncached tokens itself; 0 leaves every "
        "prompt to prefill and elastic workers, and is the default for the demo model.")] = 64
    request_timeout_s: Annotated[float, setting("limits", gt=0, description=
        "Seconds after which an unfinished request fails.")] = 600.0
    worker_wait_s: Annotated[float, setting("limits", ge=0, description=
        "Seconds that requests wait while no worker of a role is available; then they get 503.")] = 60.0
    num_proxies: Annotated[int, Meta(ge=1)] = 1
    """Proxies that share the workers."""
    # fmt: on


class AdmissionSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of `Admission` and of what refuses requests before it."""

    # fmt: off
    max_waiting_requests: Annotated[int, setting("limits", ge=0, description=
        "Maximum number of sequences per proxy that wait for their first token; further requests get 503; 0 uses 1024 "
        "with workers on CPU and 4096 with GPUs.")] = 1024
    max_waiting_tokens: Annotated[int, Meta(ge=0)] = 16_000_000
    """Limit on the prompt tokens of these sequences together; 0 for none."""
    max_requests_per_client: Annotated[int, setting("limits", ge=0, description=
        "Maximum number of sequences in flight per proxy and API key (or client address without keys); "
        "further requests get 429; 0 means no limit.")] = 0
    soonest_priority: Annotated[int, Meta(ge=-100, le=0)] = -100
    """Soonest priority of any request; a request that asks for a sooner one gets this one."""
    ttft_slo_ms: Annotated[int, setting("limits", ge=0, description=
        "Refuse requests with 503 whose predicted time to first token exceeds this many milliseconds; 0 "
        "refuses none.")] = 0
    # fmt: on

    @property
    def ttft_slo_s(self) -> float | None:
        return self.ttft_slo_ms / 1000 or None


class RecordSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of the records that `tandem replay` reads (docs/replay.md)."""

    # fmt: off
    record: Annotated[str, setting("logging", description=
        "Folder in which every request is recorded, with its prompt and its answer as tokens, for `tandem replay`; "
        "empty records only requests with the header X-Tandem-Record, for their clients.")] = ""
    record_gib: Annotated[float, setting("logging", gt=0, description=
        "Maximum size of --record's folder in GiB; the oldest records are removed.")] = 1.0
    # fmt: on


def check_folder(folder: Path) -> None:
    """Makes the operator's folder if there is none. Raises ConfigError if records cannot be written to it."""
    try:
        make_private_folder(folder, folder)
    except OSError as error:
        raise ConfigError(f"record: cannot make the folder {folder}: {error.strerror}") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"record: this user may not write to {folder}")
