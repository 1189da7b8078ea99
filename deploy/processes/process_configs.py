"""What each process of a cluster is told: made of the operator's configuration and of where the process runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from tandem.deploy.config import ClusterConfig, read_api_keys
from tandem.engine.config import EngineConfig
from tandem.media_cache.config import MediaCacheConfig
from tandem.prefill_worker.config import PrefillConfig
from tandem.protocol.messages.membership import Role
from tandem.protocol.network import NetworkConfig
from tandem.protocol.network_keys import HandedKeys, Part
from tandem.proxy.config import ProxyConfig
from tandem.worker.config import WorkerConfig

PROXY_GRACE_S = 1.5


@dataclass(frozen=True)
class Place:
    """endpoint: what the process binds; a tcp one may have port 0. host: the address at which others reach this host.

    endpoint_file: a proxy writes there what it has bound. proxies_file: a worker reads there, again when it changes,
    the proxies' control endpoints, one a line. progress_file: where a worker tells how far its model is loaded.
    control_tcp_endpoint: of a proxy, for workers of other hosts. peer_endpoints: of the other proxies, for a proxy.
    media_cache_endpoint: of this host's, empty where there is none. media_cache_tcp_endpoint: for other hosts.
    listen_fds, admin_listen_fds: of a proxy that inherits sockets, see `ProxyConfig`.
    """

    endpoint: str
    host: str = "127.0.0.1"
    proxy_endpoints: list[str] = field(default_factory=list)
    endpoint_file: str = ""
    proxies_file: str = ""
    progress_file: str = ""
    control_tcp_endpoint: str = ""
    peer_endpoints: list[str] = field(default_factory=list)
    media_cache_endpoint: str = ""
    media_cache_tcp_endpoint: str = ""
    listen_fds: list[int] = field(default_factory=list)
    admin_listen_fds: list[int] = field(default_factory=list)


class ProcessConfigs:
    """num_threads: of a rank, by role. keys: for each part that is handed its keys in its configuration; the others
    read theirs from the operator's folder. Raises ConfigError for API keys that cannot be read.
    """

    def __init__(
        self,
        cluster: ClusterConfig,
        model: str,
        served_model_name: str,
        num_threads: dict[Role, int],
        keys: Mapping[Part, HandedKeys] = MappingProxyType({}),
    ) -> None:
        self._cluster = cluster
        self._model = model
        self._served_model_name = served_model_name
        self._num_threads = num_threads
        self._keys = keys
        self._api_keys = read_api_keys(Path(cluster.api_keys_file)) if cluster.api_keys_file else []

    def proxy(self, name: str, place: Place) -> ProxyConfig:
        cluster = self._cluster
        return ProxyConfig(
            proxy_id=name,
            host=cluster.host,
            port=cluster.port,
            admin_host=cluster.admin_address[0],
            admin_port=cluster.admin_address[1],
            listen_fds=place.listen_fds,
            admin_listen_fds=place.admin_listen_fds,
            control_endpoint=place.endpoint,
            control_endpoint_file=place.endpoint_file,
            control_tcp_endpoint=place.control_tcp_endpoint,
            network=self._network("proxy"),
            model=self._model,
            served_model_name=self._served_model_name,
            api_key=cluster.api_key or None,
            api_keys=self._api_keys,
            ssl_certfile=cluster.ssl_certfile,
            ssl_keyfile=cluster.ssl_keyfile,
            tokenizer_threads=cluster.tokenizer_threads,
            trust_request_chat_template=cluster.trust_request_chat_template,
            tool_call_parser=cluster.tool_call_parser,
            max_body_bytes=cluster.max_body_mib << 20,
            max_waiting_requests=cluster.max_waiting_requests,
            max_waiting_tokens=cluster.max_waiting_tokens,
            low_priority_share=cluster.low_priority_share,
            max_requests_per_client=cluster.max_requests_per_client,
            max_connections=cluster.max_connections,
            max_connections_per_client=cluster.max_connections_per_client,
            num_proxies=cluster.proxies,
            decode_prefill_threshold=cluster.decode_prefill_threshold,
            ttft_slo_ms=cluster.ttft_slo_ms,
            client_timeout_s=cluster.client_timeout_s,
            request_timeout_s=cluster.request_timeout_s,
            worker_wait_s=cluster.worker_wait_s,
            worker_silence_s=cluster.worker_silence_s,
            shutdown_grace_s=PROXY_GRACE_S,
            drain_timeout_s=cluster.drain_timeout_s,
            media_cache_endpoint=place.media_cache_endpoint,
            media_cache_tcp_endpoint=place.media_cache_tcp_endpoint,
            media_threads=cluster.media_threads,
            max_waiting_media=cluster.max_waiting_media,
            media=cluster.media_limits(),
            trust_remote_code=cluster.trust_remote_code,
            log_level=cluster.log_level,
            log_format=cluster.log_format,
            peer_endpoints=place.peer_endpoints,
            otlp_endpoint=cluster.otlp_endpoint,
        )

    def media_cache(self, endpoint: str, tcp_endpoint: str = "", tcp_endpoint_file: str = "") -> MediaCacheConfig:
        cluster = self._cluster
        return MediaCacheConfig(
            endpoint,
            cluster.media_cache_mib << 20,
            tcp_endpoint=tcp_endpoint,
            tcp_endpoint_file=tcp_endpoint_file,
            network=self._network("proxy"),
            log_level=cluster.log_level,
        )

    def worker(self, role: Role, name: str, place: Place) -> PrefillConfig | WorkerConfig:
        """A decode worker needs nothing of its own."""
        cluster = self._cluster
        config = WorkerConfig(
            worker_id=name,
            endpoint=place.endpoint,
            proxy_endpoints=place.proxy_endpoints,
            proxies_file=place.proxies_file,
            engine=self._engine(role, place.progress_file),
            kv_connector=cluster.kv_connector,
            kv_checksums=cluster.kv_checksums,
            host=place.host,
            network=self._network("worker"),
            max_num_batched_tokens=cluster.max_num_batched_tokens,
            max_num_seqs=cluster.max_num_seqs,
            drain_timeout_s=cluster.drain_timeout_s,
            metrics_host=cluster.metrics_host,
            log_level=cluster.log_level,
            log_format=cluster.log_format,
        )
        if role == "decode":
            return config
        return PrefillConfig(
            worker=config,
            kv_lease_s=cluster.kv_lease_s,
            embedding_cache_bytes=cluster.embedding_cache_mib << 20,
            max_fetched_media_bytes=cluster.media_fetch_mib << 20,
            media_cache_endpoint=place.media_cache_endpoint,
        )

    def _network(self, part: Part) -> NetworkConfig:
        keys = self._keys.get(part)
        return self._cluster.network if keys is None else NetworkConfig(keys=keys)

    def _engine(self, role: Role, progress_file: str) -> EngineConfig:
        cluster = self._cluster
        return EngineConfig(
            model=self._model,
            dtype=cluster.dtype,
            load_format=cluster.load_format,
            device=cluster.device,
            max_model_len=cluster.max_model_len,
            block_size=cluster.block_size,
            kv_cache_bytes=int(cluster.kv_cache_gib * (1 << 30)),
            num_threads=self._num_threads[role],
            trust_remote_code=cluster.trust_remote_code,
            tensor_parallel_size=cluster.num_ranks(role),
            progress_file=progress_file,
        )


def process_environment(num_threads: int) -> dict[str, str]:
    """num_threads: of this process's (rank's) share of the model; 1 for a proxy."""
    threads = str(num_threads)
    return {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "OMP_WAIT_POLICY": "PASSIVE",  # idle workers must leave the cores to the others
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "PYTHONUNBUFFERED": "1",
        "GLOO_SOCKET_IFNAME": "lo",  # among a worker's ranks, which are on one host; pairs name their own address
    }
