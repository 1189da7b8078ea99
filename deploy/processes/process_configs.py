"""Configurations of a cluster's processes, made from the operator's configuration and the place of each process."""

from __future__ import annotations

import os
import secrets
import time
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import msgspec

from tandem.deploy.cluster_config import ClusterConfig
from tandem.engine.engine_config import EngineConfig
from tandem.media_cache.media_cache_config import MediaCacheConfig
from tandem.protocol.messages.dispatch import AdapterRef
from tandem.protocol.messages.membership import Role
from tandem.protocol.network import NetworkConfig
from tandem.protocol.network_keys import NetworkKeys, Part
from tandem.proxy.cluster.adapter_table import NamedAdapter
from tandem.proxy.http.api_keys import ApiKeys, KeyFile, parse_keys
from tandem.proxy.proxy_config import ProxyConfig
from tandem.proxy.proxy_settings import check_folder
from tandem.runtime.errors import ConfigError
from tandem.runtime.files.lora_files import InvalidAdapter, read_adapter
from tandem.runtime.files.user_paths import expanded
from tandem.runtime.processes.command_line import SAFE_PATH
from tandem.vllm_worker.vllm_worker_config import VllmEngineConfig, VllmWorkerConfig
from tandem.worker.tandem_worker_config import TandemWorkerConfig
from tandem.worker.worker_config import WorkerConfig

PROXY_GRACE_S = 1.5
"""Seconds that running streams may continue after the cluster is stopped."""


@dataclass(frozen=True)
class Place:
    """Addresses and files of one process."""

    endpoint: str
    """ZeroMQ endpoint that the process binds; a tcp endpoint may have port 0."""
    host: str = "127.0.0.1"
    """Address at which other hosts reach this one."""
    proxy_endpoints: list[str] = field(default_factory=list)
    """Control endpoints of the proxies, for a worker."""
    endpoint_file: str = ""
    """File to which a proxy writes the control endpoint that it has bound."""
    proxies_file: str = ""
    """File with the proxies' control endpoints, one per line, which a worker reads again when it changes."""
    progress_file: str = ""
    """File to which a worker writes how much of its model is loaded."""
    role_file: str = ""
    """File that keeps a worker's role across restarts."""
    control_tcp_endpoint: str = ""
    """Control endpoint of a proxy for workers of other hosts."""
    peer_endpoints: list[str] = field(default_factory=list)
    """Control endpoints of the other proxies, for a proxy."""
    media_cache_endpoint: str = ""
    """Media cache of this host; empty if there is none."""
    media_cache_tcp_endpoint: str = ""
    """Media cache of this host, for other hosts."""
    api_keys_file: str = ""
    """Copy of the operator's file for a proxy on another host; empty to read the operator's."""
    listen_fd: int | None = None
    """Bound socket that a proxy inherits; None lets it bind its own."""
    admin_listen_fd: int | None = None
    """Bound socket of the admin address that a proxy inherits; None lets it bind its own."""
    lora_file: str = ""
    """File that keeps the adapters of a host's proxies."""
    response_folder: str = ""
    """Folder of stored responses of a host's proxies."""
    record_folder: str = ""
    """Folder of the records that clients of a host's proxies ask for."""
    host_files: list[str] = field(default_factory=list)
    """Host memory of a worker's ranks for KV blocks."""
    load_turns: list[str] = field(default_factory=list)
    """A file for each GPU that a worker with vLLM's engine shares with others."""


class ProcessConfigs:
    """Makes the configuration of each process.

    cluster: with device defaults. keys: secrets that go into the configurations; parts without an entry read theirs
    from the operator's folder. ranks_per_gpu: ranks that share the memory of a GPU. on_gpus: whether workers run on
    GPUs. Raises ConfigError for API keys and LoRA adapters that cannot be read, and a folder for records that cannot be
    written to.
    """

    def __init__(
        self,
        cluster: ClusterConfig,
        keys: Mapping[Part, NetworkKeys] = MappingProxyType({}),
        ranks_per_gpu: int = 1,
        on_gpus: bool = False,
    ) -> None:
        self._cluster = cluster
        self._keys = keys
        self._signing_key = secrets.token_hex(32)
        self._ranks_per_gpu = ranks_per_gpu
        self._on_gpus = on_gpus
        http = cluster.http
        if http.api_keys_file:
            parse_keys(KeyFile(Path(http.api_keys_file)).read())
        if http.admin_keys_file and not cluster.ray:
            ApiKeys(None, Path(http.admin_keys_file), "admin_keys_file")
        if cluster.records.record and not (cluster.ray or cluster.join):  # this host runs the proxies
            check_folder(Path(cluster.records.record))
        self._adapters = read_adapters(cluster)

    def proxy(self, name: str, place: Place) -> ProxyConfig:
        cluster = self._cluster
        admin_keys = cluster.http.admin_keys_file
        http = msgspec.structs.replace(
            cluster.http,
            listen_fd=place.listen_fd,
            api_keys_file=place.api_keys_file or cluster.http.api_keys_file,
            admin_port=cluster.admin_address[1],
            admin_listen_fd=place.admin_listen_fd,
            admin_keys_file=admin_keys and str(Path(admin_keys).absolute()),
        )
        return ProxyConfig(
            proxy_id=name,
            control_endpoint=place.endpoint,
            model=cluster.engine_settings.model,
            served_model_name=cluster.served_model_name,
            control_endpoint_file=place.endpoint_file,
            control_tcp_endpoint=place.control_tcp_endpoint,
            peer_endpoints=place.peer_endpoints,
            network=self._network("proxy"),
            http=http,
            requests=cluster.requests,
            admission=msgspec.structs.replace(cluster.admission, soonest_priority=cluster.soonest_priority),
            routing=msgspec.structs.replace(cluster.routing, num_proxies=cluster.proxies),
            media=cluster.media,
            logs=cluster.logs,
            reader_processes=cluster.reader_processes,
            media_sandboxes=cluster.media_sandboxes,
            media_cache_endpoint=place.media_cache_endpoint,
            media_cache_tcp_endpoint=place.media_cache_tcp_endpoint,
            trust_remote_code=cluster.engine_settings.trust_remote_code,
            adapters=self._adapters,
            lora_file=place.lora_file,
            response_folder=place.response_folder,
            records=msgspec.structs.replace(
                cluster.records, record=cluster.records.record and str(Path(cluster.records.record).absolute())
            ),
            record_folder=place.record_folder,
            signing_key=self._signing_key,
            data_folder=str(expanded(cluster.data_dir).absolute()) if cluster.data_dir else "",
            shutdown_grace_s=PROXY_GRACE_S,
            drain_timeout_s=cluster.drain_timeout_s,
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
            logs=cluster.logs,
        )

    def worker(self, role: Role, name: str, place: Place) -> TandemWorkerConfig:
        tiers = self._cluster.tiers
        return TandemWorkerConfig(
            **msgspec.structs.asdict(self._any_worker(role, name, place)),
            engine=self._engine(role, place.progress_file),
            tiers=msgspec.structs.replace(tiers, host_files=place.host_files, kv_disk_dir=str(tiers.disk_folder or "")),
        )

    def vllm_worker(self, role: Role, name: str, place: Place) -> VllmWorkerConfig:
        shared = msgspec.structs.asdict(self._any_worker(role, name, place))
        return VllmWorkerConfig(**shared, engine=self._vllm_engine(role), load_turns=place.load_turns)

    def _any_worker(self, role: Role, name: str, place: Place) -> WorkerConfig:
        cluster = self._cluster
        return WorkerConfig(
            worker_id=name,
            role=role,
            role_file=place.role_file,
            endpoint=place.endpoint,
            proxy_endpoints=place.proxy_endpoints,
            proxies_file=place.proxies_file,
            kv_connector=cluster.kv_connector,
            exact=cluster.engine_settings.exact,
            kv_checksums=os.environ.get("TANDEM_KV_CHECKSUMS") == "1",
            host=place.host,
            network=self._network("worker"),
            itl_slo_ms=cluster.itl_slo_ms,
            adapters=[adapter.ref for adapter in self._adapters],
            drain_timeout_s=cluster.drain_timeout_s,
            metrics_host=cluster.http.admin_host,
            media_cache_endpoint=place.media_cache_endpoint,
            logs=cluster.logs,
        )

    def _network(self, part: Part) -> NetworkConfig:
        keys = self._keys.get(part)
        return self._cluster.network if keys is None else NetworkConfig(keys=keys)

    def _engine(self, role: Role, progress_file: str) -> EngineConfig:
        cluster = self._cluster
        return msgspec.structs.replace(
            cluster.engine_settings,
            kv_cache_bytes=self._kv_cache_bytes,
            ranks_per_gpu=self._ranks_per_gpu,
            num_peers=self._num_peers(cluster.num_ranks(role)),
            num_threads=cluster.num_threads(role),
            tensor_parallel_size=cluster.num_ranks(role),
            progress_file=progress_file,
        )

    def _vllm_engine(self, role: Role) -> VllmEngineConfig:
        settings = self._cluster.engine_settings
        assert settings.quantization != "int8"  # refused by `deploy.cluster_config`
        return VllmEngineConfig(
            model=settings.model,
            dtype=settings.dtype,
            load_format=settings.load_format,
            quantization=settings.quantization,
            device="cuda" if self._on_gpus else "cpu",
            max_model_len=settings.max_model_len,
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            block_size=settings.block_size,
            kv_cache_bytes=self._kv_cache_bytes,
            gpu_memory_fraction=settings.gpu_memory_fraction / self._ranks_per_gpu,
            tensor_parallel_size=self._cluster.num_ranks(role),
            num_threads=self._cluster.num_threads(role),
            trust_remote_code=settings.trust_remote_code,
            speculative_config=self._cluster.speculative_config,
            engine_args=self._cluster.engine_arg,
        )

    @property
    def _kv_cache_bytes(self) -> int:
        return int(self._cluster.kv_cache_gib * (1 << 30))

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
        "NUMBA_NUM_THREADS": threads,
        "RAYON_NUM_THREADS": threads,
        "OMP_WAIT_POLICY": "PASSIVE",  # idle threads must not spin on cores that others need
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        **SAFE_PATH,
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
        folder = expanded(path).absolute()
        try:
            adapters[name] = NamedAdapter(name, AdapterRef(read_adapter(folder).digest, str(folder)), int(time.time()))
        except InvalidAdapter as error:
            raise ConfigError(f"lora: {given}: {error.message}") from error
    if adapters and max(cluster.num_ranks(role) for role in typing.get_args(Role)) > 1:
        raise ConfigError("lora: adapters do not support tensor parallelism; use --tensor-parallel-size 1")
    return list(adapters.values())
