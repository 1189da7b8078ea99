"""The operator's configuration: one flat struct that defines the command line's flags and the file's keys.

Precedence: command line, then the `--config` file (TOML), then defaults. docs/configuration.md is made from it.
"""

from __future__ import annotations

import difflib
import os
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from tandem.engine.engine_config import Device, Dtype, KVCacheDtype, LoadFormat, Quantization
from tandem.kv_transfer.registry import check_name
from tandem.kv_transfer.tiers.store_url import parse_store_url
from tandem.protocol.messages.membership import Role
from tandem.protocol.network import NetworkConfig
from tandem.protocol.network_keys import load_keys
from tandem.proxy.admission.browser_rules import parse_origins
from tandem.proxy.parsers.parser_names import ReasoningParserName, ToolParserName
from tandem.runtime.errors import ConfigError
from tandem.runtime.logs import LogFormat

LogLevel = Literal["debug", "info", "warning", "error"]
BlockSize = Annotated[int, Meta(ge=8, le=512)] | Literal["auto"]
MIN_BATCHED_TOKENS = 16


def _in(group: str, description: str, **limits: Any) -> Meta:
    """group: heading under which `tandem up --help` and docs/configuration.md list the field."""
    return Meta(description=description, extra={"group": group}, **limits)


class ClusterConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of `tandem up` and `tandem worker`, by group; within a group the most common come first."""

    # fmt: off
    model: Annotated[str, _in("model", description=
        "Folder or Hugging Face id of the model; empty serves the built-in demo model.")] = ""
    served_model_name: Annotated[str, _in("model", description=
        "Model name that clients send; empty uses the model's own name.")] = ""
    max_model_len: Annotated[int, _in("model", ge=0, description=
        "Maximum number of tokens per sequence, prompt and output together; 0 uses the model's limit, or what fits "
        "into the KV cache if that is less.")] = 0
    dtype: Annotated[Dtype, _in("model", "Data type of weights and KV cache; auto uses the checkpoint's.")] = "auto"
    device: Annotated[Device, _in("model", "Device that runs the model; auto uses GPUs where there are any.")] = "auto"
    load_format: Annotated[LoadFormat, _in("model", description=
        "auto loads the checkpoint; dummy fills the weights with random values.")] = "auto"
    quantization: Annotated[Quantization, _in("model", description=
        "auto keeps the weights as the checkpoint has them, quantised or not; fp8 and int8 quantise those of an "
        "unquantised checkpoint while it is loaded.")] = "auto"
    lora: Annotated[list[str], _in("model", description=
        "LoRA adapter as NAME=FOLDER, in PEFT's format; requests use it by giving NAME as their model. May be "
        "repeated.")] = []
    tool_call_parser: Annotated[ToolParserName, _in("model", description=
        "Format in which the model writes tool calls; auto chooses by the chat template.")] = "auto"
    reasoning_parser: Annotated[ReasoningParserName, _in("model", description=
        "Format in which the model writes its thinking; auto chooses by the chat template, none leaves it in the "
        "answer.")] = "auto"
    generation_config: Annotated[str, _in("model", description=
        "Where defaults of sampling come from: auto reads the model's generation_config.json, vllm uses none, and a "
        "folder or file is read in place of the model's.")] = "auto"
    max_logprobs: Annotated[int, _in("model", ge=-1, description=
        "Most likely tokens that a request may ask for per token; -1 for all, which makes answers very large.")] = 20
    trust_remote_code: Annotated[bool, _in("model", "Run Python code that comes with the checkpoint.")] = False

    workers: Annotated[int, _in("workers", ge=0, le=256, description=
        "Number of elastic workers, which prefill and decode. With them, --prefill and --decode are 0 unless "
        "given.")] = 0
    prefill: Annotated[int, _in("workers", ge=0, le=256, description=
        "Number of prefill workers; with 0, decode or elastic workers compute all prompts.")] = 1
    decode: Annotated[int, _in("workers", "Number of decode workers.", ge=0, le=256)] = 1
    proxies: Annotated[int, _in("workers", "Number of proxy processes, which share the HTTP port.", ge=1, le=64)] = 1
    tensor_parallel_size: Annotated[int, _in("workers", ge=1, le=64, description=
        "Processes that share the model in each worker; on GPUs, one GPU each.")] = 1
    prefill_tensor_parallel_size: Annotated[int, _in("workers", ge=0, le=64, description=
        "Tensor parallel size of prefill workers; 0 uses --tensor-parallel-size.")] = 0
    decode_tensor_parallel_size: Annotated[int, _in("workers", ge=0, le=64, description=
        "Tensor parallel size of decode workers; 0 uses --tensor-parallel-size.")] = 0
    max_num_seqs: Annotated[int, _in("workers", ge=0, le=4096, description=
        "Maximum number of sequences that a worker runs at once; 0 uses 64 on CPU and 256 on GPUs.")] = 0
    max_num_batched_tokens: Annotated[int, _in("workers", ge=0, le=65536, description=
        "Maximum number of prompt tokens that a worker computes per step, at least 16; 0 uses 512 on CPU and 2048 on "
        "GPUs.")] = 0
    decode_prefill_threshold: Annotated[int, _in("workers", ge=0, le=65536, description=
        "A decode worker prefills prompts of up to this many uncached tokens itself; 0 leaves every "
        "prompt to prefill and elastic workers.")] = 64
    threads_per_worker: Annotated[int, _in("workers", ge=0, le=256, description=
        "CPU threads of each worker, split among its processes; 0 divides the cores among all workers.")] = 0
    worker_silence_s: Annotated[float, _in("workers", ge=1, description=
        "Seconds without a heartbeat after which a worker counts as lost.")] = 3.5
    drain_timeout_s: Annotated[float, _in("workers", gt=0, description=
        "Seconds that a draining process has to finish its requests; the rest migrates to other workers.")] = 30.0

    kv_cache_gib: Annotated[float, _in("KV cache", ge=0, description=
        "Size of each worker's KV cache in GiB, per tensor parallel process; 0 uses 1 GiB on CPU and, on GPUs, the "
        "memory that --gpu-memory-fraction leaves.")] = 0.0
    kv_cache_dtype: Annotated[KVCacheDtype, _in("KV cache", description=
        "Data type of the KV cache: auto uses the model's; fp8 (e4m3, without scales) takes half the memory of 16-bit "
        "types and rounds keys and values to 4 significant bits.")] = "auto"
    gpu_memory_fraction: Annotated[float, _in("KV cache", gt=0, le=1, description=
        "Share of each GPU's memory that this cluster may use. The workers on one GPU divide it equally. Each measures "
        "its largest step and uses the rest for its KV cache, unless --kv-cache-gib is given.")] = 0.9
    block_size: Annotated[BlockSize, _in("KV cache", description=
        "Tokens per KV block; auto chooses by device and attention backend.")] = "auto"
    kv_connector: Annotated[str, _in("KV cache", description=
        "Connector that transfers KV blocks from prefill to decode workers: auto, ipc, nixl, tcp, gloo, nccl or an "
        "installed plugin.")] = "auto"
    kv_host_gib: Annotated[float, _in("KV cache", ge=0, description=
        "Host memory in GiB per worker for KV blocks that do not fit into its KV cache, divided among its tensor "
        "parallel processes; kept while a worker is restarted. 0 uses none.")] = 0.0
    kv_disk_dir: Annotated[str, _in("KV cache", description=
        "Folder for KV blocks, which survives restarts of the cluster; all workers on a host share it. Created with "
        "mode 0700, because KV blocks reveal prompts. Empty uses none.")] = ""
    kv_disk_gib: Annotated[float, _in("KV cache", ge=0, description=
        "Maximum size of --kv-disk-dir in GiB, on each host; required with it.")] = 0.0
    kv_store: Annotated[str, _in("KV cache", description=
        "Mooncake store for KV blocks, shared by the workers of all hosts: mooncake://HOST:PORT of its master. Empty "
        "uses none.")] = ""

    host: Annotated[str, _in("HTTP", "Address on which the HTTP endpoint listens.")] = "127.0.0.1"
    port: Annotated[int, _in("HTTP", "Port of the HTTP endpoint.", ge=1, le=65535)] = 8000
    api_key: Annotated[str, _in("HTTP", "API key that clients must send; empty allows every client.")] = ""
    api_keys_file: Annotated[str, _in("HTTP", description=
        "File with further API keys, `KEY` or `KEY NAME` on each line; blank lines and lines that begin with # are "
        "ignored. Read again when it changes. Keys of one NAME share limits and cached prefixes.")] = ""
    ssl_certfile: Annotated[str, _in("HTTP", "PEM certificate; the endpoint then serves HTTPS only.")] = ""
    ssl_keyfile: Annotated[str, _in("HTTP", description=
        "PEM private key of --ssl-certfile; empty reads it from the certificate file.")] = ""
    admin_host: Annotated[str, _in("HTTP", description=
        "Address of /metrics, /dashboard and the other admin routes, which need no API key; workers serve "
        "their own /metrics on it too.")] = "127.0.0.1"
    admin_port: Annotated[int, _in("HTTP", ge=0, le=65535, description=
        "Port of the admin routes; 0 uses the port after --port.")] = 0
    admin_keys_file: Annotated[str, _in("HTTP", description=
        "File with keys, as --api-keys-file, for requests that change something on the admin address (roles, LoRA "
        "adapters). Empty takes them without a key if --admin-host is loopback, and refuses them otherwise. With "
        "--ray, the file must exist on the nodes of proxies.")] = ""
    cors_origin: Annotated[list[str], _in("HTTP", description=
        "Origin of web pages that may use the HTTP endpoint from a browser, as https://HOST[:PORT]; * for all. May be "
        "repeated, or a list separated by commas.")] = []
    trust_request_chat_template: Annotated[bool, _in("HTTP", description=
        "Allow requests to bring their own chat template (Jinja in a sandbox, at most 2 s of CPU time).")] = False
    data_dir: Annotated[str, _in("HTTP", description=
        "Folder for the Files and Batches API, which survives restarts; without it they answer 501. On several hosts "
        "it must be on a shared disk.")] = ""

    max_media_items: Annotated[int, _in("media", ge=1, le=1024, description=
        "Maximum number of images and videos per request.")] = 32
    media_cache_mib: Annotated[int, _in("media", ge=1, description=
        "Size in MiB of the shared-memory cache of processed images and videos and their embeddings.")] = 2048
    allowed_media_path: Annotated[str, _in("media", description=
        "Folder whose files clients may name by file: URLs; empty allows none.")] = ""
    allow_private_media: Annotated[bool, _in("media", description=
        "Fetch media from private and loopback addresses too, and from ports other than 80 and 443.")] = False
    allowed_media_domains: Annotated[str, _in("media", pattern="^[^/:@]*$", description=
        "Hosts that media may be fetched from, separated by commas; *.DOMAIN stands for all hosts below a domain. "
        "Empty allows every public host.")] = ""

    request_timeout_s: Annotated[float, _in("limits", "Seconds after which an unfinished request fails.", gt=0)] = 600.0
    max_body_mib: Annotated[int, _in("limits", "Maximum size of a request body in MiB.", ge=1, le=1024)] = 16
    max_waiting_requests: Annotated[int, _in("limits", ge=0, description=
        "Maximum number of sequences per proxy that wait for their first token; further requests get 503; 0 uses 1024 "
        "with workers on CPU and 4096 with GPUs.")] = 0
    max_requests_per_client: Annotated[int, _in("limits", ge=0, description=
        "Maximum number of sequences in flight per proxy and API key (or client address without keys); "
        "further requests get 429; 0 means no limit.")] = 0
    low_priority_share: Annotated[float, _in("limits", gt=0, le=1, description=
        "Share of the waiting queue that requests of lower than default priority (priority > 0) may use.")] = 1.0
    ttft_slo_ms: Annotated[int, _in("limits", ge=0, description=
        "Refuse requests with 503 whose predicted time to first token exceeds this many milliseconds; 0 "
        "refuses none.")] = 0
    itl_slo_ms: Annotated[int, _in("limits", ge=0, description=
        "Inter-token latency in milliseconds that running sequences keep while prompts compute beside them; 0 derives "
        "it from measured steps. The planner aims at it too, at 50 with 0.")] = 0
    max_connections: Annotated[int, _in("limits", ge=1, description=
        "Maximum number of HTTP connections per proxy, half of them from one address; further ones get 503 "
        "(or 429).")] = 8192
    worker_wait_s: Annotated[float, _in("limits", ge=0, description=
        "Seconds that requests wait while no worker of a role is available; then they get 503.")] = 60.0

    cluster_host: Annotated[str, _in("multi-host", description=
        "Address of this host on the network between the cluster's hosts; empty keeps the cluster on this host.")] = ""
    cluster_port: Annotated[int, _in("multi-host", ge=1, le=65535, description=
        "TCP port on which workers of other hosts reach the first proxy; further proxies and the media cache "
        "use the next ports.")] = 7777
    network_keys: Annotated[str, _in("multi-host", description=
        "Folder of keys made by `tandem keys`; they encrypt and authenticate traffic between hosts, except KV caches "
        "between GPUs.")] = ""
    insecure_network: Annotated[bool, _in("multi-host", description=
        "Allow traffic between hosts without keys; anybody who can reach the network then controls the "
        "cluster.")] = False
    join: Annotated[str, _in("multi-host", description=
        "Comma-separated endpoints of the proxies to join, as `tandem up --cluster-host` prints them; starts "
        "workers only.")] = ""
    name: Annotated[str, _in("multi-host", description=
        "Suffix of the names of joining workers, unique in the cluster; empty uses the host name.")] = ""
    ray: Annotated[str, _in("multi-host", description=
        "Address of the Ray cluster to run on; without a value, the Ray cluster of this host.")] = ""

    autoscale: Annotated[bool, _in("autoscaling", description=
        "Let the planner change roles and numbers of workers; otherwise it only proposes.")] = False
    autoscale_ttft_ms: Annotated[int, _in("autoscaling", ge=1, description=
        "Time to first token that the planner aims at, in milliseconds.")] = 1000
    autoscale_max_workers: Annotated[int, _in("autoscaling", ge=1, le=512, description=
        "Maximum number of workers of all roles together that the planner proposes.")] = 16

    log_level: Annotated[LogLevel, _in("logging", "Minimum level of the log lines of every process.")] = "info"
    log_format: Annotated[LogFormat, _in("logging", description=
        "text writes lines for people; json writes one object per line.")] = "text"
    otlp_endpoint: Annotated[str, _in("logging", description=
        "URL that receives traces, OTLP over HTTP (http://HOST:4318/v1/traces); empty sends none.")] = ""
    # fmt: on

    @property
    def admin_address(self) -> tuple[str, int]:
        """Host and port of the admin routes."""
        return self.admin_host, self.admin_port or self.port + 1

    @property
    def cors_origins(self) -> list[str]:
        """Raises ConfigError."""
        return parse_origins(self.cors_origin)

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
        return _listed(self.join)

    @property
    def media_domains(self) -> list[str]:
        return _listed(self.allowed_media_domains)

    @property
    def tokenizer_threads(self) -> int:
        """Tokenizer processes per proxy: one for every 16 cores, at least 2."""
        return min(16, max(2, num_cores() // (16 * self.proxies)))

    @property
    def media_threads(self) -> int:
        """Threads per proxy that decode and process images and videos: one for every 8 cores, at least 1."""
        return min(64, max(1, num_cores() // (8 * self.proxies)))

    @property
    def soonest_priority(self) -> int:
        """Soonest priority of any request. Clients with keys of their own may go after others, but not before them."""
        return 0 if self.api_keys_file else -100

    @property
    def counts(self) -> dict[Role, int]:
        """Number of workers at the start, by role."""
        return {"prefill": self.prefill, "decode": self.decode, "any": self.workers}

    def num_ranks(self, role: Role) -> int:
        """Tensor parallel size of the workers that start in `role`."""
        sizes = {"prefill": self.prefill_tensor_parallel_size, "decode": self.decode_tensor_parallel_size, "any": 0}
        return sizes[role] or self.tensor_parallel_size

    @property
    def disk_folder(self) -> Path | None:
        """Absolute path of --kv-disk-dir; None without it."""
        return Path(self.kv_disk_dir).expanduser().absolute() if self.kv_disk_dir else None

    def host_bytes(self, role: Role) -> int:
        """Host memory for KV blocks, per rank of a worker that starts in `role`."""
        return int(self.kv_host_gib * (1 << 30)) // self.num_ranks(role)

    def num_threads(self, role: Role) -> int:
        """CPU threads per rank: an equal share of this host's cores unless `threads_per_worker` is set; 1 on Ray."""
        num_ranks = self.num_ranks(role)
        if self.threads_per_worker or self.ray:
            return max(1, self.threads_per_worker // num_ranks)
        all_ranks = sum(count * self.num_ranks(each) for each, count in self.counts.items())
        return max(1, num_cores() // all_ranks)


def _listed(text: str) -> list[str]:
    """Returns the items of a list that is separated by commas."""
    return [item.strip() for item in text.split(",") if item.strip()]


def bracketed(host: str) -> str:
    """Returns the host as it is written before a port: IPv6 addresses get brackets."""
    return f"[{host}]" if ":" in host else host


def num_cores() -> int:
    """Returns the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0))


def flag_name(key: str) -> str:
    return "--" + key.replace("_", "-")


class Setting(NamedTuple):
    """One field of `ClusterConfig` as the command line and docs/configuration.md present it."""

    key: str
    kind: Any
    default: Any
    group: str
    description: str


def settings() -> list[Setting]:
    """Returns all fields in their order; those of one group are adjacent."""
    hints = typing.get_type_hints(ClusterConfig, include_extras=True)
    found = []
    for field in msgspec.structs.fields(ClusterConfig):
        kind, meta = typing.get_args(hints[field.name])[:2]
        found.append(Setting(field.name, kind, field.default, meta.extra["group"], meta.description))
    return found


def load_config(file: Path | None, overrides: dict[str, Any]) -> ClusterConfig:
    """Merges the TOML file and the command line's values.

    Raises ConfigError, in one line, for a file that cannot be read, an unknown or removed key, or a bad value.
    """
    values = {} if file is None else _read_file(file)
    given = {**values, **overrides}
    if given.get("workers"):
        given = {"prefill": 0, "decode": 0, **given}
    try:
        config = msgspec.convert(given, ClusterConfig, strict=True)
    except msgspec.ValidationError as error:
        raise ConfigError(_bad_value(error, values, overrides, file)) from error
    try:
        check_name(config.kv_connector)
    except ConfigError as error:
        raise ConfigError(f"kv_connector: {error.message}") from error
    if 0 < config.max_num_batched_tokens < MIN_BATCHED_TOKENS:
        raise ConfigError(f"max_num_batched_tokens: {config.max_num_batched_tokens} is less than {MIN_BATCHED_TOKENS}")
    if config.ray and not config.model:
        raise ConfigError("model: give --model with --ray, as a hub id or a folder that exists on all nodes")
    if not config.join:
        _check_workers(config)
    _check_tiers(config)
    _check_network(config)
    return config


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
    known = ClusterConfig.__struct_fields__
    for key in values:
        if key not in known:
            raise ConfigError(f"{file}: {unknown_name(key, 'key', known)}")
    return values


def _bad_value(
    error: msgspec.ValidationError, values: dict[str, Any], overrides: dict[str, Any], file: Path | None
) -> str:
    message, _, path = str(error).partition(" - at `$.")
    key = path.rstrip("`")
    if key in overrides:
        return f"{flag_name(key)} {overrides[key]}: {message[:1].lower()}{message[1:]}"
    return f"{file}: {key} = {values.get(key)!r}: {message[:1].lower()}{message[1:]}"


def _check_workers(config: ClusterConfig) -> None:
    """Checks that the workers at the start can serve, and that the planner may have as many."""
    if not config.cluster_host:  # else workers of other hosts may join
        if config.workers + config.decode == 0:
            raise ConfigError("decode: no worker could decode; give --decode 1, --workers 1, or --cluster-host")
        if config.workers + config.prefill == 0 and config.decode_prefill_threshold == 0:
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
    if config.kv_disk_dir and not config.kv_disk_gib:
        raise ConfigError(f"kv_disk_dir: give the maximum size of {config.kv_disk_dir} in GiB as --kv-disk-gib")
    if config.kv_disk_gib and not config.kv_disk_dir:
        raise ConfigError(f"kv_disk_gib: give the folder that may hold {config.kv_disk_gib:g} GiB as --kv-disk-dir")
    if config.kv_store:
        parse_store_url(config.kv_store)


def _check_network(config: ClusterConfig) -> None:
    """Checks addresses, ports, origins and keys before any process starts."""
    parse_origins(config.cors_origin)
    if config.admin_address[1] in (config.port, 65536):
        raise ConfigError(f"admin_port: {config.admin_address[1]} cannot be used; choose a port other than --port")
    if config.join and not config.cluster_host:
        raise ConfigError("join: the cluster must reach these workers; give this host's address as --cluster-host")
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
