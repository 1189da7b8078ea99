"""Starts a cluster on this host, keeps it running and takes it down.

Order up: proxies and workers all at once (loading a model takes longest). Order down: proxies first, so that streams
may end, then workers; whatever is left after the grace is killed. Nothing outlives the launcher: children ask the
kernel for a signal when it dies, pools are memfds, and the sockets lie in a folder that is removed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import socket
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec
from prometheus_client.multiprocess import mark_process_dead

from decode_worker.config import DecodeConfig
from deploy.config import ClusterConfig, bracketed, read_api_keys
from deploy.gpus import share_out, visible_gpus
from deploy.loading import fraction_loaded
from deploy.processes import ChildProcess
from deploy.runtime_dir import create_runtime_dir, log_dir
from engine.config import EngineConfig
from media_cache.config import MediaCacheConfig
from prefill_worker.config import PrefillConfig
from protocol.codec import Codec
from protocol.errors import ConfigError, InternalError
from protocol.membership import FromProxyControl, GetStatus, Role, StatusReport, WorkerExited
from protocol.process import EXIT_BAD_CONFIG, EXIT_RETIRED
from protocol.sockets import DealerSocket, new_context
from proxy.config import ProxyConfig
from proxy.model_files import takes_media

log = logging.getLogger(__name__)

START_TIMEOUT_S = 600.0
PROXY_GRACE_S = 1.5
STOP_GRACE_S = 2.5

OnProgress = Callable[[str, float | None], None]
"""Called with what is up, and with the fraction of the weights that is loaded, None before that is known."""


class Launcher:
    """One cluster. `run` returns when the cluster has been stopped; `stop` may be called from a signal handler."""

    def __init__(self, config: ClusterConfig, model: str, served_model_name: str) -> None:
        self._config = config
        self._model = model
        self._served_model_name = served_model_name
        self._children: dict[str, ChildProcess] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = asyncio.Event()
        self._fatal: Exception | None = None
        self._ready = False
        self._controls: list[DealerSocket[FromProxyControl]] = []
        self._reports: dict[int, StatusReport] = {}  # by the proxy's number
        self._metrics_dir: Path
        self._progress_files: list[Path] = []

    def stop(self) -> None:
        self._stopping.set()

    async def run(self, on_progress: OnProgress, on_ready: Callable[[Path], None]) -> None:
        """Raises ConfigError for what the operator can mend, InternalError when the cluster does not come up."""
        config = self._config
        place: int | str = config.port if not config.join else self._worker_name("worker")
        if not config.join:
            _check_port(config.host, config.port, "--port or --host")
            _check_port(*config.admin_address, "--admin-port or --admin-host")
        folder = create_runtime_dir(place)
        logs = log_dir(place)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self.stop)
        context = new_context("worker", config.network) if config.join else new_context()
        if config.cluster_host and config.insecure_network and not config.network_keys:
            log.warning("--insecure-network: whoever reaches %s can control this cluster", config.cluster_host)
        try:
            self._make_children(folder, logs)
            codec: Codec[FromProxyControl] = Codec(FromProxyControl)
            self._controls = [
                DealerSocket(context, endpoint, codec, partial(self._on_answer, number), peer="proxy")
                for number, endpoint in enumerate(self._control_endpoints(folder))
            ]
            self._tasks = [asyncio.create_task(child.run()) for child in self._children.values()]
            await self._until_ready(on_progress)
            if self._ready:
                on_ready(logs)
                await self._stopping.wait()
        finally:
            await self._stop_children()
            for control in self._controls:
                control.close()
            context.destroy(linger=0)
            shutil.rmtree(folder, ignore_errors=True)
        if self._fatal is not None:
            raise self._fatal

    # ---- what is started

    def _control_endpoints(self, folder: Path) -> list[str]:
        """Of the proxies that the workers register with: our own, or those of the cluster that they join."""
        return self._config.join_endpoints or [f"ipc://{folder}/proxy-{i}.sock" for i in range(self._config.proxies)]

    def _worker_endpoint(self, folder: Path, name: str) -> str:
        """What the worker binds: on a port that the kernel chooses where other hosts are to reach it."""
        host = self._config.cluster_host
        return f"tcp://{bracketed(host)}:*" if host else f"ipc://{folder}/{name}.sock"

    def _worker_name(self, prefix: str) -> str:
        """It stays the same when the worker is started again, and is unique in the cluster."""
        return prefix if not self._config.join else f"{prefix}-{self._config.name or socket.gethostname()}"

    def _make_children(self, folder: Path, logs: Path) -> None:
        config = self._config
        proxies = self._control_endpoints(folder)
        media_cache = self._add_media_cache(folder, logs)
        self._metrics_dir = folder / "metrics"
        self._metrics_dir.mkdir()
        api_keys = read_api_keys(Path(config.api_keys_file)) if config.api_keys_file else []
        for i, control in enumerate(proxies if not config.join else []):
            name = f"proxy-{i}"
            proxy = ProxyConfig(
                proxy_id=name,
                host=config.host,
                port=config.port,
                admin_host=config.admin_address[0],
                admin_port=config.admin_address[1],
                control_endpoint=control,
                control_tcp_endpoint=next(iter(config.proxy_endpoints[i : i + 1]), ""),
                network=config.network,
                model=self._model,
                served_model_name=self._served_model_name,
                api_key=config.api_key or None,
                api_keys=api_keys,
                ssl_certfile=config.ssl_certfile,
                ssl_keyfile=config.ssl_keyfile,
                tokenizer_threads=config.tokenizer_threads,
                trust_request_chat_template=config.trust_request_chat_template,
                tool_call_parser=config.tool_call_parser,
                max_body_bytes=config.max_body_mib << 20,
                max_waiting_requests=config.max_waiting_requests,
                max_waiting_tokens=config.max_waiting_tokens,
                max_requests_per_client=config.max_requests_per_client,
                num_proxies=config.proxies,
                decode_prefill_threshold=config.decode_prefill_threshold,
                ttft_slo_ms=config.ttft_slo_ms,
                client_timeout_s=config.client_timeout_s,
                request_timeout_s=config.request_timeout_s,
                worker_wait_s=config.worker_wait_s,
                shutdown_grace_s=PROXY_GRACE_S,
                drain_timeout_s=config.drain_timeout_s,
                media_cache_endpoint=media_cache,
                media_threads=config.media_threads,
                max_waiting_media=config.max_waiting_media,
                media=config.media_limits(),
                trust_remote_code=config.trust_remote_code,
                log_level=config.log_level,
                log_format=config.log_format,
                peer_endpoints=[endpoint for endpoint in proxies if endpoint != control],
                otlp_endpoint=config.otlp_endpoint,
            )
            self._add(name, "proxy", proxy, folder, logs)
        gpus = visible_gpus(config.device, os.environ)
        num_ranks = [config.num_ranks("prefill")] * config.prefill + [config.num_ranks("decode")] * config.decode
        shares = share_out(gpus, num_ranks)
        for i in range(config.prefill):
            name = self._worker_name(f"prefill-{i}")
            prefill = PrefillConfig(
                worker_id=name,
                endpoint=self._worker_endpoint(folder, name),
                host=config.cluster_host or "127.0.0.1",
                network=config.network,
                proxy_endpoints=proxies,
                engine=self._engine("prefill", self._progress_file(folder, name)),
                kv_connector=config.kv_connector,
                kv_checksums=config.kv_checksums,
                kv_lease_s=config.kv_lease_s,
                max_num_batched_tokens=config.max_num_batched_tokens,
                max_num_seqs=config.max_num_seqs,
                drain_timeout_s=config.drain_timeout_s,
                media_cache_endpoint=media_cache,
                metrics_host=config.metrics_host,
                log_level=config.log_level,
                log_format=config.log_format,
            )
            self._add(name, "prefill_worker", prefill, folder, logs, shares[i])
        for i in range(config.decode):
            name = self._worker_name(f"decode-{i}")
            decode = DecodeConfig(
                worker_id=name,
                endpoint=self._worker_endpoint(folder, name),
                host=config.cluster_host or "127.0.0.1",
                network=config.network,
                proxy_endpoints=proxies,
                engine=self._engine("decode", self._progress_file(folder, name)),
                kv_connector=config.kv_connector,
                kv_checksums=config.kv_checksums,
                max_num_seqs=config.max_num_seqs,
                drain_timeout_s=config.drain_timeout_s,
                max_num_batched_tokens=config.max_num_batched_tokens,
                metrics_host=config.metrics_host,
                log_level=config.log_level,
                log_format=config.log_format,
            )
            self._add(name, "decode_worker", decode, folder, logs, shares[config.prefill + i])

    def _add_media_cache(self, folder: Path, logs: Path) -> str:
        """Its endpoint; "" where the model takes text only, and needs none."""
        if not takes_media(self._model):
            return ""
        endpoint = f"ipc://{folder}/media-cache.sock"
        cache = MediaCacheConfig(endpoint, self._config.media_cache_mib << 20, self._config.log_level)
        self._add("media-cache", "media_cache", cache, folder, logs)
        return endpoint

    def _progress_file(self, folder: Path, name: str) -> Path:
        file = folder / f"{name}.loading"
        self._progress_files.append(file)
        return file

    def _engine(self, role: Role, progress_file: Path) -> EngineConfig:
        config = self._config
        return EngineConfig(
            model=self._model,
            dtype=config.dtype,
            load_format=config.load_format,
            device=config.device,
            max_model_len=config.max_model_len,
            block_size=config.block_size,
            kv_cache_bytes=int(config.kv_cache_gib * (1 << 30)),
            num_threads=config.num_threads(role),
            trust_remote_code=config.trust_remote_code,
            tensor_parallel_size=config.num_ranks(role),
            progress_file=str(progress_file),
        )

    def _add(
        self,
        name: str,
        module: str,
        config: msgspec.Struct,
        folder: Path,
        logs: Path,
        gpus: Sequence[str] | None = (),
    ) -> None:
        config_file = folder / f"{name}.json"
        config_file.touch(mode=0o600)
        config_file.write_bytes(msgspec.json.encode(config))
        threads = str(config.engine.num_threads if isinstance(config, PrefillConfig | DecodeConfig) else 1)
        env = {
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "OMP_WAIT_POLICY": "PASSIVE",  # idle workers must leave the cores to the others
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "PYTHONUNBUFFERED": "1",
            "GLOO_SOCKET_IFNAME": "lo",  # among a worker's ranks, which are on this host; pairs name their own address
        }
        if isinstance(config, ProxyConfig):
            env["PROMETHEUS_MULTIPROC_DIR"] = str(self._metrics_dir)  # there the metrics of all proxies add up
        if gpus is not None:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        self._children[name] = ChildProcess(
            name, module, config_file, logs / f"{name}.log", env, self._on_exit, folder / f"{name}.pid"
        )

    # ---- while it runs

    def _on_exit(self, name: str, pid: int, returncode: int) -> bool:
        """Tell the proxies of a worker's death; leave what cannot come up, restart the rest."""
        for control in self._controls:
            control.send(WorkerExited(name, pid))
        child = self._children[name]
        mark_process_dead(pid, str(self._metrics_dir))  # what it had under way is over
        if returncode == EXIT_BAD_CONFIG:
            self._fatal = ConfigError(child.last_error() or f"{name} refused its configuration: see {child.log_file}")
            self.stop()
            return False
        if returncode == EXIT_RETIRED:
            log.info("%s (process %d) has drained and left", name, pid)
            return False
        if not self._ready and child.num_starts >= 3:
            self._fatal = InternalError(f"{name} died {child.num_starts} times while starting: see {child.log_file}")
            self.stop()
            return False
        log.warning("%s (process %d) exited with %d; starting it again", name, pid, returncode)
        return True

    def _on_answer(self, proxy: int, message: FromProxyControl) -> None:
        if isinstance(message, StatusReport):
            self._reports[proxy] = message

    async def _until_ready(self, on_progress: OnProgress) -> None:
        """Wait until every worker has registered and every pair is open."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + START_TIMEOUT_S
        config = self._config
        while not self._stopping.is_set():
            for control in self._controls:
                control.send(GetStatus())
            reports = list(self._reports.values())
            if len(reports) == len(self._controls):
                ours = [w for report in reports for w in report.workers if w.worker.worker_id in self._children]
                pairs = [pair for worker in ours for pair in worker.pairs]
                refused = next((pair for pair in pairs if pair.state == "refused"), None)
                if refused is not None:
                    self._fatal = ConfigError(f"{refused.decode_worker_id} refused its pair: {refused.reason}")
                    return
                last = min(reports, key=_num_ready_pairs)  # of the proxies: all must know of all pairs
                roles = [worker.worker.role for worker in last.workers]
                num_ready = _num_ready_pairs(last)
                on_progress(
                    f"{roles.count('prefill')}/{config.prefill} prefill, "
                    f"{roles.count('decode')}/{config.decode} decode, "
                    f"{num_ready}/{config.prefill * config.decode} pairs",
                    fraction_loaded(self._progress_files),
                )
                if config.join:
                    is_up = all(self._knows_our_workers(report) for report in reports)
                else:
                    is_up = num_ready >= config.prefill * config.decode and await self._all_proxies_answer()
                if is_up:
                    self._ready = True
                    return
            if loop.time() > deadline:
                self._fatal = InternalError(f"the cluster did not come up within {START_TIMEOUT_S:.0f} s")
                return
            try:
                await asyncio.wait_for(self._stopping.wait(), 0.1)
            except TimeoutError:
                continue

    def _knows_our_workers(self, report: StatusReport) -> bool:
        return {worker.worker.worker_id for worker in report.workers} >= set(self._children)

    async def _all_proxies_answer(self) -> bool:
        """HTTP connections are shared out over the proxies by the kernel, so one that answers is asked for."""
        try:
            _, writer = await asyncio.wait_for(asyncio.open_connection(self._config.host, self._config.port), 1.0)
        except (OSError, TimeoutError):
            return False
        writer.close()
        return True

    async def _stop_children(self) -> None:
        proxies = [child for name, child in self._children.items() if name.startswith("proxy-")]
        for child in proxies:
            child.stop()
        tasks = dict(zip(self._children.values(), self._tasks, strict=False))
        await self._wait([tasks[child] for child in proxies if child in tasks], PROXY_GRACE_S + 0.3)
        for child in self._children.values():
            child.stop()
        await self._wait(self._tasks, STOP_GRACE_S)
        for child in self._children.values():
            child.kill()
        await self._wait(self._tasks, 1.0)

    async def _wait(self, tasks: list[asyncio.Task[None]], timeout_s: float) -> None:
        pending = [task for task in tasks if not task.done()]
        if pending:
            await asyncio.wait(pending, timeout=timeout_s)


def _num_ready_pairs(report: StatusReport) -> int:
    return sum(pair.state == "ready" for worker in report.workers for pair in worker.pairs)


def _check_port(host: str, port: int, flags: str) -> None:
    """Proxies share the port by SO_REUSEPORT, which would let a second cluster join in unnoticed: look first."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(f"cannot listen on {host}:{port} ({error.strerror}); choose another {flags}") from error
