"""The configuration of one proxy process."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from tandem.protocol.network import NetworkConfig
from tandem.proxy.api.response_store import ResponseStore
from tandem.proxy.cluster.adapter_table import AdapterTable, NamedAdapter
from tandem.proxy.media.source import MediaLimits
from tandem.proxy.parsers.parser_names import ReasoningParserName, ToolParserName
from tandem.runtime.errors import ConfigError
from tandem.runtime.logs import LogFormat


class ProxyConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The JSON file that `python -m tandem.proxy FILE` reads.

    Cluster:
      control_endpoint: ZeroMQ endpoint that the proxy binds for workers, the launcher and `tandem status`.
      control_endpoint_file: the bound endpoint is written there (it differs for tcp with port 0); empty for none.
      control_tcp_endpoint: bound as well, for other hosts; empty for none. network: how it is encrypted.
      peer_endpoints: control endpoints of the other proxies on this port.
      num_proxies: proxies that share the workers.
      worker_wait_s: how long requests wait while a role has no worker, before they are refused.
      worker_silence_s: a worker without a status for this long is lost.
      decode_prefill_threshold: uncached prompt tokens up to which a decode worker computes a prompt itself; 0 never.
    Model:
      model: folder or hub id; only its tokeniser and configuration are read.
      tokenizer_threads: tokeniser processes. trust_request_chat_template: requests may bring a chat template.
      adapters: LoRA adapters at the start. lora_file: holds them once one was loaded or unloaded; shared by the proxies
      of a host; empty if adapters cannot be loaded.
      tool_call_parser, reasoning_parser: how the model writes tool calls and thinking; see `proxy.parsers`.
      generation_config: where sampling defaults come from, see `proxy.text.sampling_defaults`.
      response_folder: holds stored responses, see `proxy.api.response_store`; shared by the proxies of a host; empty
      keeps none. data_folder: holds files and batches of clients, see `proxy.batches`; empty refuses them.
      max_logprobs: top tokens per token that a request may ask for; -1 for all.
    HTTP:
      listen_fd, admin_listen_fd: inherited sockets, bound to the address; None binds host and port.
      admin_host, admin_port: address of the admin routes, which need no key there; port 0 serves them on `port`.
      api_key, api_keys_file: None and "" let every client in. The file is read again when it changes, see
      `proxy.http.api_keys`.
      admin_keys_file: keys for requests that change something on the admin address; "" takes them on loopback only.
      cors_origins: whose pages may use the server from a browser, see `proxy.admission.browser_rules`.
      ssl_certfile, ssl_keyfile: PEM files; with them only HTTPS is served.
      max_connections: HTTP connections, half of them from one address; the descriptor limit may allow fewer.
      max_body_bytes: of one request. client_timeout_s: for a request's head to arrive, for each 16 KiB of its body,
      and for the client to read 16 KiB of an answer when its buffer is full.
      keep_alive_s: idle time between two requests of a connection. request_timeout_s: for a whole request.
      shutdown_grace_s, drain_timeout_s: how long running streams may continue after SIGINT and after SIGTERM.
    Admission:
      max_waiting_requests, max_waiting_tokens: sequences and prompt tokens that may wait for a first token.
      low_priority_share: share of both limits that requests of lower than default priority may use. soonest_priority:
      of any request.
      max_requests_per_client: running sequences of one API key, or of one address without keys; 0 for no limit.
      ttft_slo_ms: requests whose first token is predicted later are refused; 0 refuses none.
    Media:
      media_cache_endpoint: this host's media cache; empty where the model takes text only.
      media_cache_tcp_endpoint: its endpoint for prefill workers of other hosts; empty for none.
      media_threads: threads of the media process. max_waiting_media: requests with media that are fetched, processed
      or waiting for it. trust_remote_code: of the processor.
    Observability:
      otlp_endpoint: URL for traces (OTLP over HTTP); empty for none.
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
    listen_fd: int | None = None
    admin_listen_fd: int | None = None
    api_key: str | None = None
    api_keys_file: str = ""
    admin_keys_file: str = ""
    cors_origins: list[str] = []
    tokenizer_threads: Annotated[int, Meta(ge=1, le=64)] = 2
    request_timeout_s: Annotated[float, Meta(gt=0)] = 600.0
    worker_wait_s: Annotated[float, Meta(ge=0)] = 60.0
    worker_silence_s: Annotated[float, Meta(gt=0)] = 3.5
    max_body_bytes: Annotated[int, Meta(ge=1024)] = 16 * 1024 * 1024
    max_waiting_requests: Annotated[int, Meta(ge=1)] = 1024
    max_waiting_tokens: Annotated[int, Meta(ge=0)] = 16_000_000
    low_priority_share: Annotated[float, Meta(gt=0, le=1)] = 1.0
    soonest_priority: Annotated[int, Meta(ge=-100, le=0)] = -100
    max_requests_per_client: Annotated[int, Meta(ge=0)] = 0
    max_connections: Annotated[int, Meta(ge=1)] = 8192
    num_proxies: Annotated[int, Meta(ge=1)] = 1
    decode_prefill_threshold: Annotated[int, Meta(ge=0)] = 0
    ttft_slo_ms: Annotated[int, Meta(ge=0)] = 0
    client_timeout_s: Annotated[float, Meta(gt=0)] = 30.0
    keep_alive_s: Annotated[float, Meta(gt=0)] = 75.0
    trust_request_chat_template: bool = False
    adapters: list[NamedAdapter] = []
    lora_file: str = ""
    tool_call_parser: ToolParserName = "auto"
    reasoning_parser: ReasoningParserName = "auto"
    generation_config: str = "auto"
    response_folder: str = ""
    data_folder: str = ""
    max_logprobs: Annotated[int, Meta(ge=-1)] = 20
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

    def response_store(self) -> ResponseStore | None:
        return ResponseStore(Path(self.response_folder)) if self.response_folder else None

    def adapter_table(self) -> AdapterTable:
        return AdapterTable(Path(self.lora_file) if self.lora_file else None, self.adapters, self.served_model_name)


def read_config(file: Path) -> ProxyConfig:
    """Raises ConfigError with a one-line message for a file that cannot be read or decoded."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=ProxyConfig)
    except OSError as error:
        raise ConfigError(f"cannot read the proxy's config file {file}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"the proxy's config file {file} is invalid: {error}") from error
