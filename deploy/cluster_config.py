"""The operator's configuration: the launcher's settings, and those of the parts of other processes.

The flags of the command line and the keys of the file are flat. Precedence: command line, then the `--config` file
(TOML), then defaults. docs/configuration.md is made from it.
"""

from __future__ import annotations

import difflib
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from tandem.engine.engine_config import EngineConfig
from tandem.kv_transfer.registry import check_name
from tandem.kv_transfer.tiers.tier import TiersConfig, parse_store_url
from tandem.protocol.messages.membership import Role
from tandem.protocol.network import NetworkConfig
from tandem.protocol.network_keys import load_keys
from tandem.proxy.admission.browser_rules import parse_origins
from tandem.proxy.api.request_settings import RequestSettings
from tandem.proxy.media.media_limits import MediaLimits
from tandem.proxy.proxy_settings import AdmissionSettings, HttpSettings, RecordSettings, RoutingSettings
from tandem.runtime.cores import num_cores
from tandem.runtime.errors import ConfigError
from tandem.runtime.files.user_paths import expanded
from tandem.runtime.logs import LogSettings
from tandem.runtime.settings import Group, setting, with_values
from tandem.vllm_worker.engine_args import check_engine_args, check_speculative_config

EngineName = Literal["tandem", "vllm"]
MIN_BATCHED_TOKENS = 16
MIN_BLOCK_SIZE = 8
_PATHS = (
    "model", "engine_python", "generation_config", "chat_template", "data_dir", "kv_disk_dir", "network_keys",
    "api_keys_file", "admin_keys_file", "ssl_certfile", "ssl_keyfile", "record",
)  # fmt: skip
"""Settings that may name a file or a folder in the user's home as ~/PATH."""


class ClusterConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of `tandem up` and `tandem worker`: the launcher's, and those of parts that get them whole.

    The flags of a group are listed in the order of these fields.
    """

    # fmt: off
    workers: Annotated[int, setting("workers", ge=0, le=256, description=
        "Number of elastic workers, which prefill and decode. With them, --prefill and --decode are 0 unless "
        "given.")] = 0
    prefill: Annotated[int, setting("workers", ge=0, le=256, description=
        "Number of prefill workers; with 0, decode or elastic workers compute all prompts.")] = 1
    decode: Annotated[int, setting("workers", "Number of decode workers.", ge=0, le=256)] = 1
    proxies: Annotated[int, setting("workers", ge=1, le=64, description=
        "Number of proxy processes, which share the HTTP port.")] = 1
    tensor_parallel_size: Annotated[int, setting("workers", ge=1, le=64, description=
        "Processes that share the model in each worker; on GPUs, one GPU each.")] = 1
    prefill_tensor_parallel_size: Annotated[int, setting("workers", ge=0, le=64, description=
        "Tensor parallel size of prefill workers; 0 uses --tensor-parallel-size.")] = 0
    decode_tensor_parallel_size: Annotated[int, setting("workers", ge=0, le=64, description=
        "Tensor parallel size of decode workers; 0 uses --tensor-parallel-size.")] = 0
    threads_per_worker: Annotated[int, setting("workers", ge=0, le=256, description=
        "CPU threads of each worker, split among its processes; 0 divides the cores that the cluster may use among all "
        "workers.")] = 0

    engine_is_given: bool = False
    """Whether the operator has named the engine, also if it is the default."""
    engine_settings: EngineConfig = EngineConfig("", max_num_batched_tokens=0, max_num_seqs=0)
    engine: Annotated[EngineName, setting("model", description=
        "Engine of the workers: tandem is the built-in one, vllm runs vLLM's in an environment that `tandem engine "
        "install vllm` makes.")] = "tandem"
    engine_python: Annotated[str, setting("model", description=
        "Python interpreter of the environment with vLLM, on every host; empty uses the one that `tandem engine "
        "install vllm` has made.")] = ""
    engine_arg: Annotated[list[str], setting("model", description=
        "Argument of vLLM's engine as NAME=VALUE, such as enable_expert_parallel=true, with --engine vllm; vLLM's own "
        "parser checks it. May be repeated.")] = []
    speculative_config: Annotated[str, setting("model", description=
        "Speculative decoding of workers with vLLM's engine, as JSON like vLLM's flag of this name; empty decodes one "
        "token a step.")] = ""
    served_model_name: Annotated[str, setting("model", description=
        "Model name that clients send; empty uses the model's own name.")] = ""
    lora: Annotated[list[str], setting("model", description=
        "LoRA adapter as NAME=FOLDER, in PEFT's format; requests use it by giving NAME as their model. May be "
        "repeated.")] = []
    http: HttpSettings = HttpSettings()
    requests: RequestSettings = RequestSettings()

    routing: RoutingSettings = RoutingSettings()
    drain_timeout_s: Annotated[float, setting("workers", gt=0, description=
        "Seconds that a draining process has to finish its requests; the rest migrates to other workers.")] = 30.0

    kv_cache_gib: Annotated[float, setting("KV cache", ge=0, description=
        "Size of each worker's KV cache in GiB, per tensor parallel process; 0 uses 1 GiB on CPU and, on GPUs, the "
        "memory that --gpu-memory-fraction leaves.")] = 0.0
    kv_connector: Annotated[str, setting("KV cache", description=
        "Connector that transfers KV blocks from prefill to decode workers: auto, ipc, nixl, tcp, gloo, nccl or an "
        "installed plugin.")] = "auto"
    tiers: TiersConfig = TiersConfig()

    data_dir: Annotated[str, setting("HTTP", description=
        "Folder for the Files and Batches API, which survives restarts; without it they answer 501. On several hosts "
        "it must be on a shared disk.")] = ""

    media: MediaLimits = MediaLimits()
    media_cache_mib: Annotated[int, setting("media", ge=1, description=
        "Size in MiB of the shared-memory cache of processed images and videos and their embeddings.")] = 2048

    admission: AdmissionSettings = AdmissionSettings(max_waiting_requests=0)
    itl_slo_ms: Annotated[int, setting("limits", ge=0, description=
        "Inter-token latency in milliseconds that running sequences keep while prompts compute beside them; 0 derives "
        "it from measured steps. The planner aims at it too, at 50 with 0.")] = 0

    cluster_host: Annotated[str, setting("multi-host", description=
        "Address of this host on the network between the cluster's hosts; empty keeps the cluster on this host.")] = ""
    cluster_port: Annotated[int, setting("multi-host", ge=1, le=65535, description=
        "TCP port on which workers of other hosts reach the first proxy; further proxies and the media cache "
        "use the next ports.")] = 7777
    network_keys: Annotated[str, setting("multi-host", description=
        "Folder of keys made by `tandem keys`; they encrypt and authenticate traffic between hosts, except KV caches "
        "between GPUs.")] = ""
    insecure_network: Annotated[bool, setting("multi-host", description=
        "Allow traffic between hosts without keys; anybody who can reach the network then controls the "
        "cluster.")] = False
    join: Annotated[str, setting("multi-host", description=
        "Comma-separated endpoints of the proxies to join, as `tandem up --cluster-host` prints them; starts "
        "workers only.")] = ""
    name: Annotated[str, setting("multi-host", description=
        "Suffix of the names of joining workers, unique in the cluster; empty uses the host name.")] = ""
    ray: Annotated[str, setting("multi-host", description=
        "Address of the Ray cluster to run on; without a value, the Ray cluster of this host.")] = ""

    autoscale: Annotated[bool, setting("autoscaling", description=
        "Let the planner change roles and numbers of workers; otherwise it only proposes.")] = False
    autoscale_ttft_ms: Annotated[int, setting("autoscaling", ge=1, description=
        "Time to first token that the planner aims at, in milliseconds.")] = 1000
    autoscale_max_workers: Annotated[int, setting("autoscaling", ge=1, le=512, description=
        "Maximum number of workers of all roles together that the planner proposes.")] = 16

    logs: LogSettings = LogSettings()
    records: RecordSettings = RecordSettings()
    otlp_endpoint: Annotated[str, setting("logging", description=
        "URL that receives traces, OTLP over HTTP (http://HOST:4318/v1/traces); empty sends none.")] = ""
    # fmt: on

    @property
    def http_url(self) -> str:
        """URL of the HTTP API, without a path."""
        scheme = "https" if self.http.ssl_certfile else "http"
        return f"{scheme}://{bracketed(self.http.host)}:{self.http.port}"

    @property
    def admin_address(self) -> tuple[str, int]:
        """Host and port of the admin routes."""
        return self.http.admin_host, self.http.admin_port or self.http.port + 1

    @property
    def network(self) -> NetworkConfig:
        return NetworkConfig(self.network_keys and str(Path(self.network_keys).absolute()), self.insecure_network)

    @property
    def proxy_endpoints(self) -> list[str]:
        """Endpoints at which workers of other hosts reach the proxies, in order; empty without `cluster_host`."""
        ports = range(self.cluster_port, self.cluster_port + self.proxies) if self.cluster_host else ()
        return [f"tcp://{bracketed(self.cluster_host)}:{port}" for port in ports]

    @property
    def media_cache_endpoint(self) -> str:
        """Endpoint at which prefill workers of other hosts reach the media cache; empty without `cluster_host`."""
        port = self.cluster_port + self.proxies
        return f"tcp://{bracketed(self.cluster_host)}:{port}" if self.cluster_host and not self.join else ""

    @property
    def join_endpoints(self) -> list[str]:
        return [endpoint.strip() for endpoint in self.join.split(",") if endpoint.strip()]

    @property
    def reader_processes(self) -> int:
        """Processes per proxy that read and tokenise requests: one for every 16 cores, at least 2."""
        return min(16, max(2, num_cores() // (16 * self.proxies)))

    @property
    def media_sandboxes(self) -> int:
        """Sandboxes per proxy that decode and process images and videos: one for every 8 cores, at least 1."""
        return min(64, max(1, num_cores() // (8 * self.proxies)))

    @property
    def soonest_priority(self) -> int:
        """Soonest priority of any request. Clients with keys of their own may go after others, but not before them."""
        return 0 if self.http.api_keys_file else -100

    @property
    def counts(self) -> dict[Role, int]:
        """Number of workers at the start, by role."""
        return {"prefill": self.prefill, "decode": self.decode, "any": self.workers}

    def num_ranks(self, role: Role) -> int:
        """Tensor parallel size of the workers that start in `role`."""
        sizes = {"prefill": self.prefill_tensor_parallel_size, "decode": self.decode_tensor_parallel_size, "any": 0}
        return sizes[role] or self.tensor_parallel_size

    @property
    def num_all_ranks(self) -> int:
        """Ranks of all workers at the start."""
        return sum(count * self.num_ranks(each) for each, count in self.counts.items())

    def host_bytes(self, role: Role) -> int:
        """Host memory for KV blocks, per rank of a worker that starts in `role`."""
        return self.tiers.host_bytes(self.num_ranks(role))

    def num_threads(self, role: Role) -> int:
        """CPU threads per rank: an equal share of the cores unless `threads_per_worker` is set; 1 on Ray."""
        if self.threads_per_worker or self.ray:
            return max(1, self.threads_per_worker // self.num_ranks(role))
        return max(1, num_cores() // self.num_all_ranks)


def bracketed(host: str) -> str:
    """Returns the host as it is written before a port: IPv6 addresses get brackets."""
    return f"[{host}]" if ":" in host else host


def flag_name(key: str) -> str:
    return "--" + key.replace("_", "-")


class Setting(NamedTuple):
    """One setting as the command line and docs/configuration.md present it."""

    key: str
    kind: Any
    default: Any
    group: str
    description: str


def settings() -> list[Setting]:
    """Returns all settings, group by group."""
    groups = typing.get_args(Group)
    return sorted(_settings_of(ClusterConfig()), key=lambda found: groups.index(found.group))


def _settings_of(config: msgspec.Struct) -> Iterator[Setting]:
    """Yields the settings of a struct and of the structs in it. config: has the defaults."""
    hints = typing.get_type_hints(type(config), include_extras=True)
    for name in config.__struct_fields__:
        default = getattr(config, name)
        if isinstance(default, msgspec.Struct):
            yield from _settings_of(default)
            continue
        kind, *metas = typing.get_args(hints[name]) or (None,)
        for meta in metas:
            if isinstance(meta, Meta) and meta.extra is not None:
                yield Setting(name, kind, default, meta.extra["group"], str(meta.description))


def load_config(file: Path | None, overrides: dict[str, Any], serves_demo: bool = False) -> ClusterConfig:
    """Merges the TOML file and the command line's values.

    serves_demo: whether an empty model means the demo model. Its prompts are short: unless decode_prefill_threshold is
    given, it is 0 there, so that one sees prefill workers hand KV caches over.
    Raises ConfigError, in one line, for a file that cannot be read, an unknown key, or a bad value.
    """
    values = {} if file is None else _read_file(file)
    given = {**values, **overrides}
    for key in _PATHS:  # here, because processes may get another home
        if isinstance(value := given.get(key), str) and value.startswith("~"):
            given[key] = str(expanded(value))
    if isinstance(adapters := given.get("lora"), list):
        given["lora"] = [_with_path(each) if isinstance(each, str) else each for each in adapters]
    if given.get("workers"):
        given = {"prefill": 0, "decode": 0, **given}
    if serves_demo and not given.get("model") and (given.get("prefill", 1) or given.get("workers")):
        given = {"decode_prefill_threshold": 0, **given}
    try:
        defaults = ClusterConfig(engine_is_given="engine" in given)
        config = msgspec.convert(msgspec.to_builtins(with_values(defaults, given)), ClusterConfig, strict=True)
    except msgspec.ValidationError as error:
        raise ConfigError(_bad_value(error, values, overrides, file)) from error
    try:
        check_name(config.kv_connector)
    except ConfigError as error:
        raise ConfigError(f"kv_connector: {error.message}") from error
    _check_engine(config, given)
    engine = config.engine_settings
    if 0 < engine.max_num_batched_tokens < MIN_BATCHED_TOKENS:
        raise ConfigError(f"max_num_batched_tokens: {engine.max_num_batched_tokens} is less than {MIN_BATCHED_TOKENS}")
    if 0 < engine.block_size < MIN_BLOCK_SIZE:
        raise ConfigError(f"block_size: {engine.block_size} is less than {MIN_BLOCK_SIZE}")
    if config.ray and not engine.model:
        raise ConfigError("model: give --model with --ray, as a hub id or a folder that exists on all nodes")
    if not config.join:
        _check_workers(config)
    _check_tiers(config)
    _check_network(config)
    return config


def _with_path(adapter: str) -> str:
    """Returns NAME=FOLDER with a home in place of `~`."""
    name, _, path = adapter.partition("=")
    return f"{name}={expanded(path)}" if path.startswith("~") else adapter


def unknown_name(name: str, what: str, known: Sequence[str]) -> str:
    """Returns the error message for an unknown flag or key: it suggests a near match."""
    key = name.lstrip("-").replace("-", "_").lower()
    shown = flag_name if name.startswith("--") else str
    near = difflib.get_close_matches(key, known, 1, 0.5)
    hint = f"did you mean {shown(near[0])}?" if near else "docs/configuration.md lists all settings"
    return f"unknown {what} {name}; {hint}"


def _read_file(file: Path) -> dict[str, Any]:
    try:
        values = msgspec.toml.decode(file.read_bytes(), type=dict[str, Any])
    except OSError as error:
        raise ConfigError(f"cannot read the config file {file}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"the config file {file} is not valid TOML: {error}") from error
    known = [each.key for each in settings()]
    for key in values:
        if key not in known:
            raise ConfigError(f"{file}: {unknown_name(key, 'key', known)}")
    return values


def _bad_value(
    error: msgspec.ValidationError, values: dict[str, Any], overrides: dict[str, Any], file: Path | None
) -> str:
    message, _, path = str(error).partition(" - at `$.")
    key = path.rstrip("`").rpartition(".")[2]
    if key in overrides:
        return f"{flag_name(key)} {overrides[key]}: {message[:1].lower()}{message[1:]}"
    return f"{file}: {key} = {values.get(key)!r}: {message[:1].lower()}{message[1:]}"


def _check_engine(config: ClusterConfig, given: Mapping[str, Any]) -> None:
    """Checks the settings that were given against the engine."""
    if config.engine == "vllm":
        check_settings_of_vllm(given)
        check_engine_args(config.engine_arg)
        check_speculative_config(config.speculative_config)
        return
    if config.engine_python:
        raise ConfigError("engine_python: only workers with another engine have one; give --engine vllm with it")
    for key in ("engine_arg", "speculative_config"):
        if getattr(config, key):
            raise ConfigError(f"{key}: only workers with vLLM's engine take it; give --engine vllm with it")


def _check_workers(config: ClusterConfig) -> None:
    """Checks that the workers at the start can serve, and that the planner may have as many."""
    if not config.cluster_host:  # else workers of other hosts may join
        if config.workers + config.decode == 0:
            raise ConfigError("decode: no worker could decode; give --decode 1, --workers 1, or --cluster-host")
        if config.workers + config.prefill == 0 and config.routing.decode_prefill_threshold == 0:
            raise ConfigError(
                "prefill: with 0 prefill workers, decode workers must compute the prompts; leave out "
                "--decode-prefill-threshold 0, or give --workers 1"
            )
    if config.autoscale and config.workers + config.prefill == 0:
        raise ConfigError("autoscale: the planner needs a worker that may prefill; give --prefill 1 or --workers 1")
    total = sum(config.counts.values())
    if config.autoscale and config.autoscale_max_workers < total:
        raise ConfigError(
            f"autoscale_max_workers: {config.autoscale_max_workers} is too few for the {total} workers at the start"
        )


def _check_tiers(config: ClusterConfig) -> None:
    """Checks the settings of the tiers below the KV cache against each other."""
    tiers = config.tiers
    if tiers.kv_disk_dir and not tiers.kv_disk_gib:
        raise ConfigError(f"kv_disk_dir: give the maximum size of {tiers.kv_disk_dir} in GiB as --kv-disk-gib")
    if tiers.kv_disk_gib and not tiers.kv_disk_dir:
        raise ConfigError(f"kv_disk_gib: give the folder that may hold {tiers.kv_disk_gib:g} GiB as --kv-disk-dir")
    if tiers.kv_store:
        parse_store_url(tiers.kv_store)


def _check_network(config: ClusterConfig) -> None:
    """Checks addresses, ports, origins and keys before any process starts."""
    parse_origins(config.http.cors_origin)
    if config.admin_address[1] in (config.http.port, 65536):
        raise ConfigError(f"admin_port: {config.admin_address[1]} cannot be used; choose a port other than --port")
    if config.join and not config.cluster_host:
        raise ConfigError("join: the cluster must reach these workers; give this host's address as --cluster-host")
    if not re.fullmatch(r"[\w.-]{0,100}", config.name):  # it names files
        raise ConfigError(f"name: {config.name!r} may have letters, digits, '.', '_' and '-', at most 100 of them")
    wrong = next((each for each in config.join_endpoints if not each.startswith("tcp://")), None)
    if wrong is not None:
        raise ConfigError(f"join: {wrong!r} is not an endpoint; write it as tcp://HOST:PORT")
    if config.cluster_host in ("0.0.0.0", "::", "*"):
        raise ConfigError(
            f"cluster_host: other hosts cannot reach {config.cluster_host}; give an address of this host instead"
        )
    if config.cluster_port + config.proxies > 65535:
        raise ConfigError(
            f"cluster_port: {config.proxies} proxies and the media cache need that many ports above "
            f"{config.cluster_port}; choose a lower one"
        )
    if config.ray and (config.cluster_host or config.join):
        raise ConfigError("ray: Ray provides the addresses of its nodes; leave out --cluster-host and --join")
    if (config.ray or config.cluster_host) and not (config.network_keys or config.insecure_network):
        raise ConfigError(
            f"{'ray' if config.ray else 'cluster_host'}: traffic between hosts would not be protected; make keys with "
            "`tandem keys FOLDER` and give --network-keys FOLDER, or give --insecure-network if nobody else can reach "
            "this network"
        )
    if config.network_keys:
        load_keys(Path(config.network_keys), "operator" if config.ray else "worker")


# ---- settings that have no meaning, or fewer values, for workers with vLLM's engine

_NO_TIERS = "vLLM's KV cache has no tiers below it"
_ONE_SIZE = "workers with vLLM's engine have one size; use --tensor-parallel-size"
VALUES_WITH_VLLM: dict[str, tuple[tuple[object, ...], str]] = {
    "prefill_tensor_parallel_size": ((0,), _ONE_SIZE),
    "decode_tensor_parallel_size": ((0,), _ONE_SIZE),
    "quantization": (("auto", "fp8"), "vLLM quantises to fp8, or takes a checkpoint that is quantised already"),
    "kv_cache_dtype": (("auto",), "give vLLM's own data type as --engine-arg kv_cache_dtype=VALUE"),
    "kv_connector": (("auto", "ipc", "tcp", "nixl"), "KV moves between vLLM workers over ipc, tcp or nixl"),
    "kv_host_gib": ((0,), _NO_TIERS),
    "kv_disk_dir": (("",), _NO_TIERS),
    "kv_disk_gib": ((0,), _NO_TIERS),
    "kv_store": (("",), _NO_TIERS),
}
"""Values with --engine vllm and why there are no others, by setting."""


def check_settings_of_vllm(given: Mapping[str, Any]) -> None:
    """Checks the settings that the operator has given. Raises ConfigError, in one line that names the setting."""
    for key, (values, reason) in VALUES_WITH_VLLM.items():
        if key in given and given[key] not in values:
            raise ConfigError(f"{key}: {given[key]} cannot be used with --engine vllm: {reason}")


# ---- settings whose defaults depend on the device of the workers

_CPU = {"max_num_seqs": 64, "max_num_batched_tokens": 512, "max_waiting_requests": 1024}
_GPU = {"max_num_seqs": 256, "max_num_batched_tokens": 2048, "max_waiting_requests": 4096}


def with_device_defaults(config: ClusterConfig, on_gpus: bool) -> ClusterConfig:
    """Returns the configuration with values for the settings that are 0 and mean a default by device."""
    defaults = dict(_GPU if on_gpus else _CPU)
    if config.engine == "vllm":  # chooses by the memory of the device, which the worker knows
        del defaults["max_num_batched_tokens"], defaults["max_num_seqs"]
    given = msgspec.structs.asdict(config.engine_settings) | msgspec.structs.asdict(config.admission)
    return with_values(config, {key: given[key] or value for key, value in defaults.items()})


def ranks_per_gpu(config: ClusterConfig, num_gpus: int) -> int:
    """Returns how many ranks of the workers at the start share the most used GPU. num_gpus: at least 1."""
    num_ranks = sum(count * config.num_ranks(role) for role, count in config.counts.items())
    return max(1, -(-num_ranks // num_gpus))
