"""What one proxy process is told at its start."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from tandem.protocol.network import NetworkConfig
from tandem.proxy.api.tool_formats import ToolFormatName
from tandem.proxy.media.source import MediaLimits
from tandem.runtime.errors import ConfigError
from tandem.runtime.logs import LogFormat


class ProxyConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file that `python -m tandem.proxy FILE` reads, as JSON.

    control_endpoint: where workers, the launcher and `tandem status` reach this proxy (ZeroMQ, bound here);
    control_endpoint_file: written with what was bound, which matters when that is tcp with port 0; empty: not written.
    control_tcp_endpoint: the same for other hosts, empty where there are none; network: how it is protected.
    model: folder or hub id; its tokeniser and configuration alone are read. api_key, api_keys: None and [] let everyone
    in.
    listen_fds, admin_listen_fds: bound sockets that the process inherits, its own and then the other proxies' of this
    host; with none it binds for itself.
    admin_host, admin_port: where what `proxy.http.admin_routes` has is served, without a key; 0 serves it beside the
    rest.
    sockets_per_worker: connections to each worker; one request stays on one of them.
    worker_wait_s: how long requests wait while no worker of a role is there; then they are refused.
    worker_silence_s: a worker that has sent no status for so long is lost.
    max_waiting_requests: sequences that may wait for their first token; beyond that requests are refused.
    max_waiting_tokens: the same for prompt tokens. low_priority_share: of both, for requests that are later than the
    default. max_requests_per_client:
    sequences that one client (a key, or an address where there are no keys) may have under way. 0 sets no bound.
    max_connections: of HTTP, at most what the system's limit of descriptors allows; max_connections_per_client: from
    one address, 0 takes half of them.
    num_proxies: that share the workers. decode_prefill_threshold: uncached prompt tokens that a decode worker computes
    itself; 0 never. ttft_slo_ms: requests whose first token is predicted later are refused; 0 refuses none.
    client_timeout_s: for a request's head to arrive, for each 16 KiB of its body, and for the client to take as much of
    the answer when its buffer is full. ssl_certfile, ssl_keyfile: PEM files; then HTTPS alone is served.
    keep_alive_s: how long a connection may be idle between two requests.
    tokenizer_threads: of execution, each a process of its own, see `proxy.reading.reader_pool`.
    trust_request_chat_template: requests may bring a chat template of their own.
    tool_call_parser: how the model writes tool calls, see `proxy.api.tool_formats`.
    shutdown_grace_s, drain_timeout_s: how long running streams may go on after SIGINT, and after SIGTERM.
    media_cache_endpoint: of the host's media cache; "" where the model takes text only. media_cache_tcp_endpoint: where
    prefill workers of other hosts reach it; "" where there are none. media_threads: of execution,
    in
    a process of their own (`proxy.reading.media_process`). max_waiting_media: requests with media that are fetched
    and processed, or wait for it; more are refused. trust_remote_code: of the processor.
    peer_endpoints: control endpoints of the other proxies on this port. otlp_endpoint: URL that takes traces (OTLP over
    HTTP), empty for none.
    """

    proxy_id: str
    control_endpoint: str
    model: str
    served_model_name: str
    control_tcp_endpoint: str = ""
    network: NetworkConfig = NetworkConfig()
    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=1, le=65535)] = 8000
    control_endpoint_file: str = ""
    admin_host: str = "127.0.0.1"
    admin_port: Annotated[int, Meta(ge=0, le=65535)] = 0
    listen_fds: list[int] = []
    admin_listen_fds: list[int] = []
    api_key: str | None = None
    api_keys: list[str] = []
    tokenizer_threads: Annotated[int, Meta(ge=1, le=64)] = 2
    sockets_per_worker: Annotated[int, Meta(ge=1, le=64)] = 1
    request_timeout_s: Annotated[float, Meta(gt=0)] = 600.0
    worker_wait_s: Annotated[float, Meta(ge=0)] = 60.0
    worker_silence_s: Annotated[float, Meta(gt=0)] = 2.5
    max_body_bytes: Annotated[int, Meta(ge=1024)] = 16 * 1024 * 1024
    max_waiting_requests: Annotated[int, Meta(ge=1)] = 1024
    max_waiting_tokens: Annotated[int, Meta(ge=0)] = 16_000_000
    low_priority_share: Annotated[float, Meta(gt=0, le=1)] = 1.0
    max_requests_per_client: Annotated[int, Meta(ge=0)] = 0
    max_connections: Annotated[int, Meta(ge=1)] = 8192
    max_connections_per_client: Annotated[int, Meta(ge=0)] = 0
    num_proxies: Annotated[int, Meta(ge=1)] = 1
    decode_prefill_threshold: Annotated[int, Meta(ge=0)] = 0
    ttft_slo_ms: Annotated[int, Meta(ge=0)] = 0
    client_timeout_s: Annotated[float, Meta(gt=0)] = 30.0
    keep_alive_s: Annotated[float, Meta(gt=0)] = 75.0
    trust_request_chat_template: bool = False
    tool_call_parser: ToolFormatName = "hermes"
    ssl_certfile: str = ""
    ssl_keyfile: str = ""
    media_cache_endpoint: str = ""
    media_cache_tcp_endpoint: str = ""
    media_threads: Annotated[int, Meta(ge=1, le=64)] = 1
    max_waiting_media: Annotated[int, Meta(ge=1)] = 512
    media: MediaLimits = MediaLimits()
    trust_remote_code: bool = False
    shutdown_grace_s: Annotated[float, Meta(ge=0)] = 3.0
    drain_timeout_s: Annotated[float, Meta(ge=0)] = 30.0
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: LogFormat = "text"
    peer_endpoints: list[str] = []
    otlp_endpoint: str = ""


def read_config(file: Path) -> ProxyConfig:
    """Raises ConfigError, in one line, for a file that cannot be read or does not decode."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=ProxyConfig)
    except OSError as error:
        raise ConfigError(f"cannot read the proxy's config file {file}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"the proxy's config file {file} is wrong: {error}") from error
