"""The operator's configuration: one flat struct, from which the command line's flags and the file's keys are made.

Order of precedence: command line, `--config` file (TOML), defaults.
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from tandem.engine.config import Device, Dtype, LoadFormat
from tandem.kv_transfer.registry import check_name
from tandem.protocol.messages.membership import Role
from tandem.protocol.network import NetworkConfig
from tandem.protocol.network_keys import load_keys
from tandem.proxy.api.tool_formats import ToolFormatName
from tandem.proxy.media.source import MediaLimits
from tandem.runtime.errors import ConfigError
from tandem.runtime.logs import LogFormat

LogLevel = Literal["debug", "info", "warning", "error"]


class ClusterConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything `tandem up` can be told."""

    model: Annotated[str, Meta(description="folder or hub id of the model; empty serves the built-in demo model")] = ""
    served_model_name: Annotated[str, Meta(description="name that clients use; empty takes the model's own")] = ""
    prefill: Annotated[
        int, Meta(ge=0, le=256, description="prefill workers; with 0 decode workers compute all prompts (of text)")
    ] = 1
    decode: Annotated[int, Meta(ge=0, le=256, description="decode workers")] = 1
    proxies: Annotated[int, Meta(ge=1, le=64, description="proxy processes, which share the port")] = 1
    host: Annotated[str, Meta(description="address that the HTTP endpoint binds")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=1, le=65535, description="port of the HTTP endpoint")] = 8000
    admin_host: Annotated[
        str, Meta(description="address of calls for who runs the cluster, such as /metrics; no key is asked for there")
    ] = "127.0.0.1"
    admin_port: Annotated[
        int, Meta(ge=0, le=65535, description="port of these calls; 0 takes the one after --port")
    ] = 0
    device: Annotated[Device, Meta(description="where the model runs")] = "auto"
    kv_connector: Annotated[
        str, Meta(description="how KV caches move from prefill to decode: auto, ipc, gloo, nccl or an installed one")
    ] = "auto"
    kv_checksums: Annotated[
        bool, Meta(description="compare every KV block at both ends of its transfer (slow; for debugging)")
    ] = False
    kv_lease_s: Annotated[
        float,
        Meta(ge=1, description="seconds that prefill keeps KV blocks for a decode worker that stops asking for them"),
    ] = 10.0
    dtype: Annotated[Dtype, Meta(description="type of weights and KV cache; auto takes the checkpoint's")] = "auto"
    load_format: Annotated[
        LoadFormat, Meta(description="auto loads the checkpoint; dummy makes random weights from its config alone")
    ] = "auto"
    max_model_len: Annotated[
        int, Meta(ge=0, description="tokens per sequence, prompt and output together; 0 takes the model's limit")
    ] = 0
    api_key: Annotated[str, Meta(description="key that clients must send; empty lets everyone in")] = ""
    api_keys_file: Annotated[
        str,
        Meta(description="file with more keys, one on a line; blank lines and those that begin with # are left out"),
    ] = ""
    kv_cache_gib: Annotated[float, Meta(gt=0, description="GiB of KV cache per worker, in each rank of it")] = 1.0
    block_size: Annotated[int, Meta(ge=8, le=512, description="tokens per KV block")] = 64
    max_num_batched_tokens: Annotated[
        int, Meta(ge=16, le=65536, description="prompt tokens that a worker computes per step")
    ] = 512
    decode_prefill_threshold: Annotated[
        int,
        Meta(
            ge=0,
            le=65536,
            description="prompt tokens, not cached, that a decode worker computes itself; all of them when no prefill "
            "worker is left; 0 never",
        ),
    ] = 64
    max_num_seqs: Annotated[int, Meta(ge=1, le=4096, description="sequences that a worker runs at once")] = 64
    tensor_parallel_size: Annotated[
        int, Meta(ge=1, le=64, description="processes (on GPUs: devices) that share the model in each worker")
    ] = 1
    prefill_tensor_parallel_size: Annotated[
        int, Meta(ge=0, le=64, description="the same for prefill workers; 0 takes --tensor-parallel-size")
    ] = 0
    decode_tensor_parallel_size: Annotated[
        int, Meta(ge=0, le=64, description="the same for decode workers; 0 takes --tensor-parallel-size")
    ] = 0
    threads_per_worker: Annotated[
        int,
        Meta(
            ge=0,
            le=256,
            description="CPU threads of each worker's model, split among its ranks; 0 shares the cores out",
        ),
    ] = 0
    ssl_certfile: Annotated[str, Meta(description="PEM certificate; with it the endpoint speaks HTTPS alone")] = ""
    ssl_keyfile: Annotated[str, Meta(description="PEM key of --ssl-certfile; empty takes it from that file")] = ""
    tokenizer_threads: Annotated[
        int, Meta(ge=1, le=64, description="of each proxy, each a process: long bodies read at once")
    ] = 2
    max_body_mib: Annotated[int, Meta(ge=1, le=1024, description="MiB of a request's body")] = 16
    max_waiting_requests: Annotated[
        int, Meta(ge=1, description="sequences per proxy that wait for a first token; more are refused with 503")
    ] = 1024
    max_waiting_tokens: Annotated[int, Meta(ge=0, description="the same for their prompt tokens; 0 sets no bound")] = (
        16_000_000
    )
    low_priority_share: Annotated[
        float,
        Meta(gt=0, le=1, description="of both, that requests of a priority over 0, later than the default, may take"),
    ] = 1.0
    max_queue_s: Annotated[
        float,
        Meta(
            ge=0,
            description="seconds for which a crowd (64 sequences) may wait without a break; then no more may wait than "
            "were served in that time, and past capacity in a fifth of it; 0 sets no bound",
        ),
    ] = 5.0
    max_requests_per_client: Annotated[
        int,
        Meta(
            ge=0,
            description="sequences per proxy of one API key, or of one address where there are no keys; more get 429; "
            "0 sets no bound",
        ),
    ] = 0
    max_connections: Annotated[
        int, Meta(ge=1, description="HTTP connections per proxy, at most what descriptors allow; more get 503")
    ] = 8192
    max_connections_per_client: Annotated[
        int, Meta(ge=0, description="of these, from one address; more get 429; 0 takes half of them")
    ] = 0
    ttft_slo_ms: Annotated[
        int,
        Meta(ge=0, description="refuse requests whose first token is predicted later, in milliseconds; 0 refuses none"),
    ] = 0
    ray: Annotated[
        str,
        Meta(description="run on the Ray cluster at this address; without one, on that of this host; empty: no Ray"),
    ] = ""
    ray_proxy_resource: Annotated[
        str, Meta(description="Ray resource that a node must have for a proxy to run there; each takes 1; empty: any")
    ] = ""
    autoscale: Annotated[
        bool, Meta(description="change the numbers of workers as the planner proposes; otherwise it only proposes")
    ] = False
    autoscale_ttft_ms: Annotated[int, Meta(ge=1, description="TTFT that the planner keeps, in milliseconds")] = 1000
    autoscale_itl_ms: Annotated[int, Meta(ge=1, description="ITL that the planner keeps, in milliseconds")] = 50
    autoscale_min_prefill: Annotated[int, Meta(ge=1, le=256, description="fewest prefill workers it proposes")] = 1
    autoscale_max_prefill: Annotated[int, Meta(ge=1, le=256, description="most prefill workers it proposes")] = 8
    autoscale_min_decode: Annotated[int, Meta(ge=1, le=256, description="fewest decode workers it proposes")] = 1
    autoscale_max_decode: Annotated[int, Meta(ge=1, le=256, description="most decode workers it proposes")] = 8
    autoscale_max_workers: Annotated[
        int, Meta(ge=0, le=512, description="most workers of both roles together that it proposes; 0 sets no bound")
    ] = 0
    autoscale_down_after_s: Annotated[
        float, Meta(ge=1, description="seconds for which fewer workers must have sufficed before some are stopped")
    ] = 120.0
    client_timeout_s: Annotated[
        float, Meta(gt=0, description="seconds for a client to send its headers, or to send or read 16 KiB")
    ] = 30.0
    request_timeout_s: Annotated[float, Meta(gt=0, description="seconds after which a request is given up")] = 600.0
    worker_silence_s: Annotated[
        float,
        Meta(
            ge=1,
            description="seconds without a sign of life after which a worker counts as lost; more where machines stall",
        ),
    ] = 2.5
    process_silence_s: Annotated[
        float,
        Meta(ge=5, description="seconds without an answer after which a proxy, or the media cache, is started again"),
    ] = 10.0
    worker_wait_s: Annotated[
        float, Meta(ge=0, description="seconds that requests wait while no worker of a role is left; then they get 503")
    ] = 60.0
    drain_timeout_s: Annotated[
        float,
        Meta(gt=0, description="seconds that a process which is told to leave has to finish what is under way"),
    ] = 30.0
    media_threads: Annotated[
        int,
        Meta(ge=1, le=64, description="of each proxy, in a process of its own: images and videos processed at once"),
    ] = 1
    media_cache_mib: Annotated[
        int,
        Meta(ge=1, description="MiB of shared memory for processed images and videos, and what the model saw in them"),
    ] = 2048
    embedding_cache_mib: Annotated[
        int,
        Meta(
            ge=0, description="MiB in each prefill worker for what its model saw in images and videos; 0 keeps nothing"
        ),
    ] = 256
    media_fetch_mib: Annotated[
        int,
        Meta(ge=1, description="MiB of processed images and videos that a prefill worker holds from other hosts"),
    ] = 1024
    max_waiting_media: Annotated[
        int,
        Meta(ge=1, description="requests per proxy whose images or videos are not processed yet; more get 503"),
    ] = 512
    max_media_items: Annotated[int, Meta(ge=1, le=1024, description="images and videos in one request")] = 32
    max_media_mib: Annotated[int, Meta(ge=1, le=4096, description="MiB of one image or video, as it is sent")] = 64
    max_image_mpixels: Annotated[
        float, Meta(gt=0, description="million pixels of an image, or of a frame of a video")
    ] = 33.6
    max_video_frames: Annotated[
        int, Meta(ge=1, le=4096, description="frames that are taken of a video, at equal distances")
    ] = 32
    max_video_mpixels: Annotated[
        float, Meta(gt=0, description="million pixels of all frames of a video that must be decoded")
    ] = 4295.0
    media_decode_timeout_s: Annotated[
        float, Meta(gt=0, description="seconds for the frames of a video to be decoded")
    ] = 20.0
    max_fetched_media_mib: Annotated[
        int,
        Meta(
            ge=1,
            description="MiB of images and videos per proxy that were fetched and are not processed yet; more get 503",
        ),
    ] = 1024
    media_timeout_s: Annotated[
        float, Meta(gt=0, description="seconds for an image or video to be fetched from its URL")
    ] = 10.0
    allowed_media_path: Annotated[
        str, Meta(description="folder whose files clients may name by file: URLs; empty allows none")
    ] = ""
    allow_private_media: Annotated[
        bool, Meta(description="fetch images and videos from private, loopback and link-local addresses too")
    ] = False
    trust_remote_code: Annotated[bool, Meta(description="run model code that comes with the checkpoint")] = False
    tool_call_parser: Annotated[
        ToolFormatName, Meta(description="how the model writes tool calls: hermes (also Qwen) or llama3_json")
    ] = "hermes"
    trust_request_chat_template: Annotated[
        bool, Meta(description="let clients bring chat templates (jinja, in a sandbox, 2 s of CPU time each)")
    ] = False
    log_format: Annotated[LogFormat, Meta(description="how log lines are written: for people, or an object each")] = (
        "text"
    )
    otlp_endpoint: Annotated[
        str,
        Meta(description="URL that traces are sent to, OTLP over HTTP (http://HOST:4318/v1/traces); empty sends none"),
    ] = ""
    metrics_host: Annotated[str, Meta(description="address that every worker serves its own /metrics on")] = "127.0.0.1"
    cluster_host: Annotated[
        str,
        Meta(
            description="own address on the network between the cluster's hosts; empty keeps the cluster to this host"
        ),
    ] = ""
    cluster_port: Annotated[
        int,
        Meta(
            ge=1,
            le=65535,
            description="where workers of other hosts reach the first proxy; others take the next ports, and then the "
            "media cache",
        ),
    ] = 7777
    network_keys: Annotated[
        str, Meta(description="folder of the keys that tandem keys has made; they protect traffic between hosts")
    ] = ""
    insecure_network: Annotated[
        bool, Meta(description="let traffic between hosts go without keys: who reaches it controls the cluster")
    ] = False
    join: Annotated[
        str,
        Meta(
            description="start workers alone, for a cluster that runs: its proxies' endpoints, as tandem up prints "
            "them, with commas between"
        ),
    ] = ""
    name: Annotated[str, Meta(description="with --join: part of the workers' names, unique in the cluster")] = ""
    log_level: Annotated[LogLevel, Meta(description="how much every process logs")] = "info"
    log_file_mib: Annotated[
        int, Meta(ge=0, description="MiB of a process's log file; then it becomes NAME.log.1; 0 sets no bound")
    ] = 64

    @property
    def admin_address(self) -> tuple[str, int]:
        return self.admin_host, self.admin_port or self.port + 1

    @property
    def network(self) -> NetworkConfig:
        return NetworkConfig(self.network_keys and str(Path(self.network_keys).absolute()), self.insecure_network)

    @property
    def proxy_endpoints(self) -> list[str]:
        """Where workers of other hosts reach the proxies, in their order; empty where there are none."""
        ports = range(self.cluster_port, self.cluster_port + self.proxies) if self.cluster_host else ()
        return [f"tcp://{bracketed(self.cluster_host)}:{port}" for port in ports]

    @property
    def media_cache_endpoint(self) -> str:
        """Where prefill workers of other hosts reach the media cache: the port after the proxies'. Empty as above."""
        port = self.cluster_port + self.proxies
        return f"tcp://{bracketed(self.cluster_host)}:{port}" if self.cluster_host and not self.join else ""

    @property
    def join_endpoints(self) -> list[str]:
        return [endpoint.strip() for endpoint in self.join.split(",") if endpoint.strip()]

    def media_limits(self) -> MediaLimits:
        return MediaLimits(
            max_items=self.max_media_items,
            max_bytes=self.max_media_mib << 20,
            max_pixels=int(self.max_image_mpixels * 1_000_000),
            max_video_frames=self.max_video_frames,
            max_video_pixels=int(self.max_video_mpixels * 1_000_000),
            max_fetched_bytes=self.max_fetched_media_mib << 20,
            fetch_timeout_s=self.media_timeout_s,
            decode_timeout_s=self.media_decode_timeout_s,
            allowed_path=self.allowed_media_path,
            allow_private=self.allow_private_media,
        )

    def num_ranks(self, role: Role) -> int:
        """How many processes share the model in each worker of this role."""
        of_role = self.prefill_tensor_parallel_size if role == "prefill" else self.decode_tensor_parallel_size
        return of_role or self.tensor_parallel_size

    def num_threads(self, role: Role) -> int:
        """Threads per rank: as told, or an equal share of the cores (two workers on a core each beat two on both)."""
        num_ranks = self.num_ranks(role)
        if self.threads_per_worker:
            return max(1, self.threads_per_worker // num_ranks)
        all_ranks = self.prefill * self.num_ranks("prefill") + self.decode * self.num_ranks("decode")
        return max(1, _num_cores() // all_ranks)


def bracketed(host: str) -> str:
    """As addresses are written before a port."""
    return f"[{host}]" if ":" in host else host


def _num_cores() -> int:
    return len(os.sched_getaffinity(0))


def field_descriptions() -> dict[str, str]:
    """Field name to what it means, for the command line's help and the README's table."""
    described = {}
    for field in msgspec.inspect.type_info(ClusterConfig).fields:  # type: ignore[attr-defined]
        extra = getattr(field.type, "extra_json_schema", None) or {}
        described[field.name] = extra.get("description", "")
    return described


def load_config(file: Path | None, overrides: dict[str, Any]) -> ClusterConfig:
    """Raises ConfigError, in one line, for a file that cannot be read, an unknown key or a value out of range."""
    values: dict[str, Any] = {}
    if file is not None:
        try:
            values = msgspec.toml.decode(file.read_bytes(), type=dict[str, Any])
        except OSError as error:
            raise ConfigError(f"cannot read the config file {file}: {error.strerror}") from error
        except msgspec.DecodeError as error:
            raise ConfigError(f"{file} is not valid TOML: {error}") from error
    known = ClusterConfig.__struct_fields__
    unknown = [key for key in values if key not in known]
    if unknown:
        near = difflib.get_close_matches(unknown[0].replace("-", "_").lower(), known, 1, 0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
        raise ConfigError(f"unknown key {unknown[0]!r} in {file}; {hint}")
    try:
        config = msgspec.convert({**values, **overrides}, ClusterConfig, strict=True)
    except msgspec.ValidationError as error:
        raise ConfigError(_readable(error)) from error
    try:
        check_name(config.kv_connector)
    except ConfigError as error:
        raise ConfigError(f"kv_connector: {error.message}") from error
    if config.ray and not config.model:
        raise ConfigError("model: with ray it is needed, as a hub id or a folder that all nodes have")
    _check_network(config)
    if not config.join:
        _check_autoscaling(config)
    return config


def _check_autoscaling(config: ClusterConfig) -> None:
    for role, count, least, most in (
        ("prefill", config.prefill, config.autoscale_min_prefill, config.autoscale_max_prefill),
        ("decode", config.decode, config.autoscale_min_decode, config.autoscale_max_decode),
    ):
        if least > most:
            raise ConfigError(f"autoscale_min_{role}: {least} is more than autoscale_max_{role}, which is {most}")
        if config.autoscale and not least <= count <= most:
            raise ConfigError(f"{role}: {count} is not between autoscale_min_{role} and autoscale_max_{role}")
    least_workers = config.autoscale_min_prefill + config.autoscale_min_decode
    if 0 < config.autoscale_max_workers < least_workers:
        raise ConfigError(f"autoscale_max_workers: at least {least_workers} are needed for the minimum of both roles")
    if config.autoscale and 0 < config.autoscale_max_workers < config.prefill + config.decode:
        raise ConfigError(f"autoscale_max_workers: {config.prefill + config.decode} workers are there from the start")


def _check_network(config: ClusterConfig) -> None:
    """What the processes would find out too, but later and each for itself."""
    if not (config.cluster_host or config.join):
        if config.decode == 0:
            raise ConfigError("decode: 0 workers only where others can join; give --cluster-host, or one at least")
        if config.prefill == 0 and config.decode_prefill_threshold == 0:
            raise ConfigError(
                "prefill: with 0 workers decode must compute the prompts; leave out --decode-prefill-threshold 0"
            )
        if config.prefill == 0 and config.autoscale:
            raise ConfigError("autoscale: it keeps a ratio of prefill and decode workers; give one --prefill at least")
    if config.admin_address[1] in (config.port, 65536):
        raise ConfigError(f"admin_port: {config.admin_address[1]} cannot be it; choose a port that is not --port")
    if config.join and not config.cluster_host:
        raise ConfigError("join: the cluster must reach these workers; give this host's address as --cluster-host")
    wrong = next((each for each in config.join_endpoints if not each.startswith("tcp://")), None)
    if wrong is not None:
        raise ConfigError(f"join: {wrong!r} is no endpoint; write it as tcp://HOST:PORT")
    if config.cluster_host in ("0.0.0.0", "::", "*"):
        raise ConfigError(f"cluster_host: {config.cluster_host} is no address that other hosts can reach; name one")
    if config.cluster_port + config.proxies > 65535:
        raise ConfigError(
            f"cluster_port: {config.proxies} proxies and the media cache do not fit above {config.cluster_port}"
        )
    if config.ray and (config.cluster_host or config.join):
        raise ConfigError("ray: addresses are those of Ray's nodes; leave out --cluster-host and --join")
    if config.ray and not (config.network_keys or config.insecure_network):
        raise ConfigError(
            "ray: traffic between nodes would not be protected; make keys with `tandem keys FOLDER` and give "
            "--network-keys FOLDER, or say --insecure-network where nobody else can reach it"
        )
    if config.cluster_host and not (config.network_keys or config.insecure_network):
        raise ConfigError(
            "cluster_host: traffic between hosts would not be protected; make keys with `tandem keys FOLDER` and give "
            "--network-keys FOLDER, or say --insecure-network where nobody else can reach this network"
        )
    if config.network_keys:
        load_keys(Path(config.network_keys), "operator" if config.ray else "worker")


def read_api_keys(file: Path) -> list[str]:
    """Raises ConfigError, in one line, for a file that cannot be read or holds no keys."""
    try:
        lines = [line.strip() for line in file.read_text().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"api_keys_file: cannot read {file}: {reason}") from error
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ConfigError(f"api_keys_file: {file} holds no keys; write one on each line")
    return list(dict.fromkeys(keys))


def _readable(error: msgspec.ValidationError) -> str:
    message, _, path = str(error).partition(" - at `$.")
    return f"{path.rstrip('`')}: {message}" if path else message
