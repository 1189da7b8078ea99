"""Configurations of a cluster's processes, made from the operator's configuration and the place of each process."""

from __future__ import annotations

import os
import time
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from tandem.deploy.cluster_config import ClusterConfig
from tandem.engine.engine_config import EngineConfig
from tandem.kv_transfer.tiers.tier import TiersConfig
from tandem.media_cache.media_cache_config import MediaCacheConfig
from tandem.protocol.lora_files import InvalidAdapter, read_adapter
from tandem.protocol.messages.adapter import AdapterRef
from tandem.protocol.messages.membership import Role
from tandem.protocol.network import NetworkConfig
from tandem.protocol.network_keys import NetworkKeys, Part
from tandem.proxy.cluster.adapter_table import NamedAdapter
from tandem.proxy.http.api_keys import ApiKeys, KeyFile, parse_keys
from tandem.proxy.media.source import MediaLimits
from tandem.proxy.proxy_config import ProxyConfig
from tandem.runtime.errors import ConfigError
from tandem.worker.worker_config import WorkerConfig

PROXY_GRACE_S = 1.5
"""Seconds that running streams may continue after the cluster is stopped."""


@dataclass(frozen=True)
class Place:
    """Addresses and files of one process.

    endpoint: ZeroMQ endpoint that the process binds; a tcp endpoint may have port 0.
    host: address at which other hosts reach this one.
    proxy_endpoints: control endpoints of the proxies, for a worker; peer_endpoints: of the other proxies, for a proxy.
    endpoint_file: file to which a proxy writes the control endpoint that it has bound.
    proxies_file: file with the proxies' control endpoints, one per line; a worker reads it again when it changes.
    progress_file: file to which a worker writes how much of its model is loaded. role_file: see `WorkerConfig`.
    control_tcp_endpoint: control endpoint of a proxy for workers of other hosts.
    media_cache_endpoint: media cache of this host, empty if there is none; media_cache_tcp_endpoint: for other hosts.
    api_keys_file: copy of the operator's file for a proxy on another host; empty to read the operator's.
    lora_file, response_folder: see `ProxyConfig`. host_files: see `TiersConfig`.
    listen_fd, admin_listen_fd: bound sockets that a proxy inherits; None lets it bind its own.
    """

    endpoint: str
    host: str = "127.0.0.1"
    proxy_endpoints: list[str] = field(default_factory=list)
    endpoint_file: str = ""
    proxies_file: str = ""
    progress_file: str = ""
    role_file: str = ""
    control_tcp_endpoint: str = ""
    peer_endpoints: list[str] = field(default_factory=list)
    media_cache_endpoint: str = ""
    media_cache_tcp_endpoint: str = ""
    api_keys_file: str = ""
    listen_fd: int | None = None
    admin_listen_fd: int | None = None
    lora_file: str = ""
    response_folder: str = ""
    host_files: list[str] = field(default_factory=list)


class ProcessConfigs:
    """Makes the configuration of each process.

    cluster: with device defaults. keys: secrets that go into the configurations; parts without an entry read theirs
    from the operator's folder. ranks_per_gpu: ranks that share the memory of a GPU. Raises ConfigError for API keys and
    LoRA adapters that cannot be read.
    """

    def __init__(
        self,
        cluster: ClusterConfig,
        keys: Mapping[Part, NetworkKeys] = MappingProxyType({}),
        ranks_per_gpu: int = 1,
    ) -> None:
        self._cluster = cluster
        self._keys = keys
        self._ranks_per_gpu = ranks_per_gpu
        if cluster.api_keys_file:
            parse_keys(KeyFile(Path(cluster.api_keys_file)).read())
        if cluster.admin_keys_file and not cluster.ray:
            ApiKeys(None, Path(cluster.admin_keys_file), "admin_keys_file")
        self._adapters = read_adapters(cluster)

    def proxy(self, name: str, place: Place) -> ProxyConfig:
        cluster = self._cluster
        return ProxyConfig(
            proxy_id=name,
            host=cluster.host,
            port=cluster.port,
            admin_host=cluster.admin_address[0],
            admin_port=cluster.admin_address[1],
            listen_fd=place.listen_fd,
            admin_listen_fd=place.admin_listen_fd,
            control_endpoint=place.endpoint,
            control_endpoint_file=place.endpoint_file,
            control_tcp_endpoint=place.control_tcp_endpoint,
            network=self._network("proxy"),
            model=cluster.model,
            served_model_name=cluster.served_model_name,
            api_key=cluster.api_key or None,
            api_keys_file=place.api_keys_file or cluster.api_keys_file,
            admin_keys_file=str(Path(cluster.admin_keys_file).absolute()) if cluster.admin_keys_file else "",
            cors_origins=cluster.cors_origins,
            ssl_certfile=cluster.ssl_certfile,
            ssl_keyfile=cluster.ssl_keyfile,
            tokenizer_threads=cluster.tokenizer_threads,
            trust_request_chat_template=cluster.trust_request_chat_template,
            adapters=self._adapters,
            lora_file=place.lora_file,
            response_folder=place.response_folder,
            data_folder=str(Path(cluster.data_dir).expanduser().absolute()) if cluster.data_dir else "",
            tool_call_parser=cluster.tool_call_parser,
            reasoning_parser=cluster.reasoning_parser,
            generation_config=cluster.generation_config,
            max_logprobs=cluster.max_logprobs,
            max_body_bytes=cluster.max_body_mib << 20,
            max_waiting_requests=cluster.max_waiting_requests,
            low_priority_share=cluster.low_priority_share,
            soonest_priority=cluster.soonest_priority,
            max_requests_per_client=cluster.max_requests_per_client,
            max_connections=cluster.max_connections,
            num_proxies=cluster.proxies,
            decode_prefill_threshold=cluster.decode_prefill_threshold,
            ttft_slo_ms=cluster.ttft_slo_ms,
            request_timeout_s=cluster.request_timeout_s,
            worker_wait_s=cluster.worker_wait_s,
            worker_silence_s=cluster.worker_silence_s,
            shutdown_grace_s=PROXY_GRACE_S,
            drain_timeout_s=cluster.drain_timeout_s,
            media_cache_endpoint=place.media_cache_endpoint,
            media_cache_tcp_endpoint=place.media_cache_tcp_endpoint,
            media_threads=cluster.media_threads,
            media=MediaLimits(
                max_items=cluster.max_media_items,
                max_request_pixels=max(cluster.max_media_items, 32) << 24,
                allowed_path=cluster.allowed_media_path,
                allow_private=cluster.allow_private_media,
                allowed_domains=cluster.media_domains,
            ),
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

    def worker(self, role: Role, name: str, place: Place) -> WorkerConfig:
        cluster = self._cluster
        return WorkerConfig(
            worker_id=name,
            role=role,
            role_file=place.role_file,
            endpoint=place.endpoint,
            proxy_endpoints=place.proxy_endpoints,
            proxies_file=place.proxies_file,
            engine=self._engine(role, place.progress_file),
            kv_connector=cluster.kv_connector,
            kv_checksums=os.environ.get("TANDEM_KV_CHECKSUMS") == "1",
            host=place.host,
            network=self._network("worker"),
            itl_slo_ms=cluster.itl_slo_ms,
            adapters=[adapter.ref for adapter in self._adapters],
            drain_timeout_s=cluster.drain_timeout_s,
            metrics_host=cluster.admin_host,
            media_cache_endpoint=place.media_cache_endpoint,
            tiers=self._tiers(role, place.host_files),
            log_level=cluster.log_level,
            log_format=cluster.log_format,
        )

    def _tiers(self, role: Role, host_files: list[str]) -> TiersConfig:
        cluster = self._cluster
        return TiersConfig(
            host_files=host_files,
            host_bytes=cluster.host_bytes(role),
            disk_folder=str(cluster.disk_folder or ""),
            disk_bytes=int(cluster.kv_disk_gib * (1 << 30)),
            store=cluster.kv_store,
        )

    def _network(self, part: Part) -> NetworkConfig:
        keys = self._keys.get(part)
        return self._cluster.network if keys is None else NetworkConfig(keys=keys)

    def _engine(self, role: Role, progress_file: str) -> EngineConfig:
        cluster = self._cluster
        return EngineConfig(
            model=cluster.model,
            dtype=cluster.dtype,
            load_format=cluster.load_format,
            quantization=cluster.quantization,
            device=cluster.device,
            max_model_len=cluster.max_model_len,
            block_size=0 if cluster.block_size == "auto" else cluster.block_size,
            kv_cache_dtype=cluster.kv_cache_dtype,
            kv_cache_bytes=int(cluster.kv_cache_gib * (1 << 30)),
            gpu_memory_fraction=cluster.gpu_memory_fraction,
            ranks_per_gpu=self._ranks_per_gpu,
            num_peers=self._num_peers(cluster.num_ranks(role)),
            max_num_batched_tokens=cluster.max_num_batched_tokens,
            max_num_seqs=cluster.max_num_seqs,
            num_threads=cluster.num_threads(role),
            trust_remote_code=cluster.trust_remote_code,
            tensor_parallel_size=cluster.num_ranks(role),
            progress_file=progress_file,
        )

    def _num_peers(self, num_ranks: int) -> int:
        """Ranks of other workers to which one of the `num_ranks` ranks of a worker connects over NCCL, at most.

        Those share heads with it. Workers of one host use `ipc`, unless another connector is named.
        """
        cluster = self._cluster
        spans_hosts = bool(cluster.ray or cluster.cluster_host or cluster.join)
        if cluster.kv_connector != "nccl" and not (cluster.kv_connector == "auto" and spans_hosts):
            return 0
        others = ((count, cluster.num_ranks(role)) for role, count in cluster.counts.items())
        return max(1, sum(count * num_sharing_ranks(num_ranks, size) for count, size in others) - 1)


def num_sharing_ranks(num_ranks: int, other: int) -> int:
    """Ranks of a worker of `other` ranks that share heads with one rank of a worker of `num_ranks`, at most."""
    divides = num_ranks % other == 0 or other % num_ranks == 0
    return -(-other // num_ranks) + (not divides)


def process_environment(num_threads: int) -> dict[str, str]:
    """Environment variables of a process with `num_threads` compute threads per rank."""
    threads = str(num_threads)
    return {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "OMP_WAIT_POLICY": "PASSIVE",  # idle threads must not spin on cores that others need
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "PYTHONUNBUFFERED": "1",
        "GLOO_SOCKET_IFNAME": "lo",  # ranks of a worker share a host; KV transfer sets its own address
    }


def read_adapters(cluster: ClusterConfig) -> list[NamedAdapter]:
    """Reads the adapters of --lora. Raises ConfigError."""
    adapters: dict[str, NamedAdapter] = {}
    for given in cluster.lora:
        name, equals, path = given.partition("=")
        if not (name and equals and path):
            raise ConfigError(f"lora: {given!r} is not NAME=FOLDER")
        if name == cluster.served_model_name or name in adapters:
            raise ConfigError(f"lora: the name {name!r} is in use; give the adapter of {path} another")
        folder = Path(path).expanduser().absolute()
        try:
            adapters[name] = NamedAdapter(name, AdapterRef(read_adapter(folder).digest, str(folder)), int(time.time()))
        except InvalidAdapter as error:
            raise ConfigError(f"lora: {given}: {error.message}") from error
    if adapters and max(cluster.num_ranks(role) for role in typing.get_args(Role)) > 1:
        raise ConfigError("lora: adapters do not support tensor parallelism; use --tensor-parallel-size 1")
    return list(adapters.values())
