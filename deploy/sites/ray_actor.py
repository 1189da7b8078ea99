"""Ray actor that starts one process of Tandem on its node, reports its end, and ends with it.

Beside a proxy it also keeps a media cache running. A worker's actor forks it from a preloaded process, and again when
it has crashed; otherwise the launcher restarts processes in new actors (`deploy.sites.ray_process`). Must not import
torch, nor import ray before it runs on a node.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
from functools import partial
from pathlib import Path

import msgspec

from tandem.deploy.processes.child_process import ChildProcess, Program
from tandem.deploy.processes.engine_python import EnginePython, find_engine_python
from tandem.deploy.processes.gpu_environment import gpu_environment
from tandem.deploy.processes.log_file import LogFile
from tandem.deploy.processes.preloaded import PreloadedWorker
from tandem.deploy.processes.runtime_dir import make_process_folder
from tandem.deploy.processes.supervisor import MAX_RESTART_DELAY_S
from tandem.deploy.processes.user_folders import make_missing_folders
from tandem.media_cache.media_cache_config import MediaCacheConfig
from tandem.protocol.proxy_endpoints import write_endpoints
from tandem.runtime.errors import ConfigError
from tandem.runtime.files.whole_file import write_whole
from tandem.runtime.processes.forked_process import ForkedProcess
from tandem.runtime.processes.lifetime import end_process
from tandem.runtime.tasks import keep_running, start_job

POLL_S = 0.05
MEDIA_CACHE_START_S = 60.0


class NodePlace(msgspec.Struct, frozen=True):
    """Where an actor runs."""

    host: str
    """Address of the node in the Ray cluster."""
    folder: str
    """Files of the process, removed when the actor is closed."""
    node_id: str
    """Ray's name of the node."""


class ProcessEnd(msgspec.Struct, frozen=True):
    """log: last lines of the process's output."""

    returncode: int
    log: str


class ProcessActor:
    """Async actor. The kernel ends the process when its parent, the actor, is gone."""

    def __init__(self, name: str) -> None:
        self._folder = make_process_folder(name)
        os.environ.update(make_missing_folders(self._folder))  # of this process and those that it starts
        self._output = LogFile(self._folder / "log")
        self._limiting: asyncio.Task[None] | None = None
        self._process: asyncio.subprocess.Process | ForkedProcess | None = None
        self._preloaded: PreloadedWorker | None = None
        self._engine_python: EnginePython | None = None
        self._media_cache: ChildProcess | None = None
        self._running_cache: asyncio.Task[None] | None = None

    async def place(self) -> NodePlace:
        import ray

        node_id = ray.get_runtime_context().get_node_id()
        return NodePlace(ray.util.get_node_ip_address(), str(self._folder), node_id)

    async def gpu_environment(self) -> dict[str, str]:
        """See `deploy.processes.gpu_environment`. Raises ConfigError."""
        return gpu_environment((await self.place()).host, os.environ)

    async def start_media_cache(self, config: bytes, env: dict[str, str]) -> str:
        """Starts the media cache and returns its tcp endpoint, which it keeps when it is restarted.

        config: JSON; its tcp_endpoint_file is in this actor's folder. Raises RuntimeError if the cache does not start.
        """
        decoded = msgspec.json.decode(config, type=MediaCacheConfig)
        config_file = Path(f"/proc/{os.getpid()}/fd/{os.memfd_create('media-cache')}")
        config_file.write_bytes(config)
        output = LogFile(self._folder / "media-cache.log")
        program = Program("tandem.media_cache", config_file, env)
        pid_file = self._folder / "media-cache.pid"
        self._media_cache = cache = ChildProcess("media-cache", program, output, lambda *_: True, pid_file)
        end = partial(end_process, "the media cache is not supervised any more")  # the launcher replaces the actor
        self._running_cache = start_job(cache.run(), "the supervisor of the media cache", end)
        endpoint_file = Path(decoded.tcp_endpoint_file)
        for _ in range(int(MEDIA_CACHE_START_S / POLL_S)):
            if endpoint_file.exists():
                break
            await asyncio.sleep(POLL_S)
        else:
            raise RuntimeError(f"the media cache did not start: {cache.last_error() or output.tail()}")
        endpoint = endpoint_file.read_text()
        config_file.write_bytes(msgspec.json.encode(msgspec.structs.replace(decoded, tcp_endpoint=endpoint)))
        return endpoint

    async def preload(self, module: str, env: dict[str, str], on_cpu: bool) -> str:
        """Starts the process from which `start` forks and waits for its imports. Returns its error, or "".

        module: of that process. env: of the worker.
        """
        if self._preloaded is None:
            self._preloaded = PreloadedWorker(env, on_cpu, self._folder, module)
            self._preloaded.spawn_once()
        try:
            await self._preloaded.until_loaded()
        except ConfigError as error:
            return str(error)
        return ""

    async def find_engine_python(self, given: str) -> str:
        """Finds the interpreter on this node with which `start` starts the process. Returns the error, or ""."""
        try:
            self._engine_python = await asyncio.to_thread(find_engine_python, given)
        except ConfigError as error:
            return f"{error} (on this node)"
        return ""

    async def start(self, module: str, config: bytes, env: dict[str, str], proxies: list[str]) -> int:
        """Starts `python -m module` and returns its pid. config: JSON, passed in memory because it contains keys."""
        write_endpoints(self._folder / "proxies", proxies)
        config_fd = os.memfd_create("config")
        try:
            os.write(config_fd, config)
            config_file = Path(f"/proc/self/fd/{config_fd}")
            python = sys.executable
            if self._engine_python is not None:
                python, env = str(self._engine_python.path), env | self._engine_python.environment(self._folder)
            program = Program(module, config_file, env, [config_fd], self._preloaded, python)
            self._process = await program.start(self._output)
        finally:
            os.close(config_fd)
        if self._limiting is None:
            self._limiting = keep_running(self._output.limit_size, "limiting the log", MAX_RESTART_DELAY_S)
        return self._process.pid

    async def set_proxies(self, endpoints: list[str]) -> None:
        write_endpoints(self._folder / "proxies", endpoints)

    async def set_api_keys(self, text: str) -> None:
        """Writes the API keys that a proxy reads, as the operator's file has them."""
        write_whole(self._folder / "api-keys", text)

    async def set_role(self, role: str) -> None:
        """Writes the role with which a worker begins."""
        write_whole(self._folder / "role", role)

    async def endpoint(self) -> str | None:
        """The control endpoint that the proxy has bound; None if it ended before that."""
        file = self._folder / "endpoint"
        assert self._process is not None
        while self._process.returncode is None:
            if file.exists():
                return file.read_text()
            await asyncio.sleep(POLL_S)
        return None

    async def wait(self) -> ProcessEnd:
        assert self._process is not None
        returncode = await self._process.wait()
        return ProcessEnd(returncode, self._output.tail())

    async def send_signal(self, number: int) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.Signals(number))

    async def close(self) -> None:
        if self._limiting is not None:
            self._limiting.cancel()
        if self._preloaded is not None:
            self._preloaded.close()
        if self._media_cache is not None and self._running_cache is not None:
            self._media_cache.kill()
            self._running_cache.cancel()
        shutil.rmtree(self._folder, ignore_errors=True)
