"""The configuration of one proxy process: the operator's settings, and the places that its launcher has chosen."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from tandem.protocol.network import NetworkConfig
from tandem.proxy.api.request_settings import RequestSettings
from tandem.proxy.api.responses_api.response_store import ResponseStore
from tandem.proxy.cluster.adapter_table import AdapterTable, NamedAdapter
from tandem.proxy.media.media_limits import MediaLimits
from tandem.proxy.proxy_settings import AdmissionSettings, HttpSettings, RecordSettings, RoutingSettings
from tandem.runtime.errors import ConfigError
from tandem.runtime.logs import LogSettings


class ProxyConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The JSON file that `python -m tandem.proxy FILE` reads."""

    proxy_id: str
    control_endpoint: str
    """ZeroMQ endpoint that the proxy binds for workers, the launcher and `tandem status`."""
    model: str
    """Folder or hub id; only the tokeniser, the templates and the configurations are read."""
    served_model_name: str
    control_endpoint_file: str = ""
    """File to which the bound endpoint is written, since it differs for tcp with port 0; empty for none."""
    control_tcp_endpoint: str = ""
    """Second control endpoint, for other hosts; empty for none."""
    peer_endpoints: list[str] = []
    """Control endpoints of the other proxies on this port."""
    network: NetworkConfig = NetworkConfig()
    http: HttpSettings = HttpSettings()
    requests: RequestSettings = RequestSettings()
    admission: AdmissionSettings = AdmissionSettings()
    routing: RoutingSettings = RoutingSettings()
    media: MediaLimits = MediaLimits()
    logs: LogSettings = LogSettings()
    reader_processes: Annotated[int, Meta(ge=1, le=64)] = 2
    """Processes that read and tokenise requests, beside one that no single client can hold."""
    media_sandboxes: Annotated[int, Meta(ge=1, le=64)] = 1
    """Sandboxes of the media process that one client may hold. There is one more."""
    media_cache_endpoint: str = ""
    """Media cache of this host; empty where the model takes text only."""
    media_cache_tcp_endpoint: str = ""
    """Endpoint of the media cache for prefill workers of other hosts; empty for none."""
    trust_remote_code: bool = False
    """Whether the processor of media may run code that comes with the checkpoint."""
    adapters: list[NamedAdapter] = []
    """LoRA adapters at the start."""
    lora_file: str = ""
    """File of the adapters once one was loaded or unloaded, shared by the proxies of a host; empty refuses both."""
    response_folder: str = ""
    """Folder of stored responses, shared by the proxies of a host; empty keeps none."""
    records: RecordSettings = RecordSettings()
    record_folder: str = ""
    """Folder of the records that clients ask for, shared by the proxies of a host; `records.record` takes its place.
    Without both, no requests are recorded."""
    signing_key: str = ""
    """Secret of the cluster by which its proxies sign thinking blocks; empty draws one for this proxy."""
    data_folder: str = ""
    """Folder of clients' files and batches; empty refuses them."""
    shutdown_grace_s: Annotated[float, Meta(ge=0)] = 3.0
    """Seconds that running streams may continue after SIGINT."""
    drain_timeout_s: Annotated[float, Meta(ge=0)] = 30.0
    """Seconds that running streams may continue after SIGTERM."""
    otlp_endpoint: str = ""
    """URL that receives traces, OTLP over HTTP; empty sends none."""

    def response_store(self) -> ResponseStore | None:
        return ResponseStore(Path(self.response_folder)) if self.response_folder else None

    def adapter_table(self) -> AdapterTable:
        return AdapterTable(Path(self.lora_file) if self.lora_file else None, self.adapters, self.served_model_name)

    def without_secrets(self) -> ProxyConfig:
        """Returns the configuration of a process that parses untrusted data."""
        return msgspec.structs.replace(self, http=HttpSettings(), signing_key="")


def read_config(file: Path) -> ProxyConfig:
    """Raises ConfigError with a one-line message for a file that cannot be read or decoded."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=ProxyConfig)
    except OSError as error:
        raise ConfigError(f"cannot read the proxy's config file {file}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"the proxy's config file {file} is invalid: {error}") from error
