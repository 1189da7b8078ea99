"""What one proxy process is told at its start."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from protocol.errors import ConfigError
from proxy.tool_formats import ToolFormatName


class ProxyConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file that `python -m proxy FILE` reads, as JSON.

    control_endpoint: where workers, the launcher and `tandem status` reach this proxy (ZeroMQ, bound here).
    control_endpoint_file: written with what was bound, which matters when that is tcp with port 0; empty: not written.
    model: folder or hub id; its tokeniser and configuration alone are read. api_key, api_keys: None and [] let everyone
    in.
    sockets_per_worker: connections to each worker; one request stays on one of them.
    worker_silence_s: a worker that has sent no status for so long is lost.
    max_waiting_requests: sequences that may wait for their first token; beyond that requests are refused.
    max_waiting_tokens: the same for prompt tokens. max_requests_per_client: sequences that one client (a key, or an
    address where there are no keys) may have under way. 0 sets no bound.
    num_proxies: that share the workers. decode_prefill_threshold: uncached prompt tokens that a decode worker computes
    itself; 0 never. ttft_slo_ms: requests whose first token is predicted later are refused; 0 refuses none.
    client_timeout_s: for a request's head to arrive, for each 16 KiB of its body, and for the client to take as much of
    the answer when its buffer is full. ssl_certfile, ssl_keyfile: PEM files; then HTTPS alone is served.
    tokenizer_threads: of execution, each a process of its own, see `proxy.reader_pool`.
    trust_request_chat_template: requests may bring a chat template of their own.
    tool_call_parser: how the model writes tool calls, see `proxy.tool_formats`.
    shutdown_grace_s: how long running streams may go on after SIGTERM.
    """

    proxy_id: str
    control_endpoint: str
    model: str
    served_model_name: str
    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=1, le=65535)] = 8000
    control_endpoint_file: str = ""
    api_key: str | None = None
    api_keys: list[str] = []
    tokenizer_threads: Annotated[int, Meta(ge=1, le=64)] = 2
    sockets_per_worker: Annotated[int, Meta(ge=1, le=64)] = 1
    request_timeout_s: Annotated[float, Meta(gt=0)] = 600.0
    worker_silence_s: Annotated[float, Meta(gt=0)] = 2.5
    max_body_bytes: Annotated[int, Meta(ge=1024)] = 16 * 1024 * 1024
    max_waiting_requests: Annotated[int, Meta(ge=1)] = 1024
    max_waiting_tokens: Annotated[int, Meta(ge=0)] = 0
    max_requests_per_client: Annotated[int, Meta(ge=0)] = 0
    num_proxies: Annotated[int, Meta(ge=1)] = 1
    decode_prefill_threshold: Annotated[int, Meta(ge=0)] = 0
    ttft_slo_ms: Annotated[int, Meta(ge=0)] = 0
    client_timeout_s: Annotated[float, Meta(gt=0)] = 30.0
    trust_request_chat_template: bool = False
    tool_call_parser: ToolFormatName = "hermes"
    ssl_certfile: str = ""
    ssl_keyfile: str = ""
    shutdown_grace_s: Annotated[float, Meta(ge=0)] = 3.0
    log_level: Literal["debug", "info", "warning", "error"] = "info"


def read_config(file: Path) -> ProxyConfig:
    """Raises ConfigError, in one line, for a file that cannot be read or does not decode."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=ProxyConfig)
    except OSError as error:
        raise ConfigError(f"cannot read the proxy's config file {file}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"the proxy's config file {file} is wrong: {error}") from error
