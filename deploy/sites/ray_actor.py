"""What Ray runs on a node for one process of Tandem: starts it there, tells how it fares, and ends with it.

Beside a proxy it keeps a media cache, which serves that proxy. One actor starts one process once; starting again, and
elsewhere, is the launcher's business (`deploy.sites.ray_site`). Must not import torch, nor ray before it runs on a
node.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import msgspec

from tandem.deploy.processes.child_process import ChildProcess
from tandem.deploy.processes.log_file import LogFile
from tandem.media_cache.config import MediaCacheConfig
from tandem.protocol.proxy_endpoints import write_endpoints

POLL_S = 0.05
MEDIA_CACHE_START_S = 60.0


class NodePlace(msgspec.Struct, frozen=True):
    """host: the node's address in the Ray cluster. folder: for the process's files, gone when the actor is closed."""

    host: str
    folder: str


class ProcessEnd(msgspec.Struct, frozen=True):
    """log: its last lines."""

    pid: int
    returncode: int
    log: str


class ProcessActor:
    """An async actor. The process ends with it: the kernel signals it when its parent is gone."""

    def __init__(self, name: str) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix=f"tandem-{name}-"))  # mode 0700
        self._keeping: asyncio.Task[None] | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._media_cache: ChildProcess | None = None
        self._keeping_cache: asyncio.Task[None] | None = None

    async def place(self) -> NodePlace:
        import ray

        return NodePlace(ray.util.get_node_ip_address(), str(self._folder))

    async def start_media_cache(self, config: bytes, env: dict[str, str], max_log_bytes: int) -> str:
        """The tcp endpoint that it has bound, and binds again when it has to be started again.

        config: as of `start`; its tcp_endpoint_file lies in this folder. Raises RuntimeError when it does not come up.
        """
        told = msgspec.json.decode(config, type=MediaCacheConfig)
        config_file = Path(f"/proc/{os.getpid()}/fd/{os.memfd_create('media-cache')}")
        config_file.write_bytes(config)
        output = LogFile(self._folder / "media-cache.log", max_log_bytes)
        self._media_cache = cache = ChildProcess(
            "media-cache",
            "tandem.media_cache",
            config_file,
            output,
            env,
            lambda *_: True,
            self._folder / "media-cache.pid",
        )
        self._keeping_cache = asyncio.create_task(cache.run())
        endpoint_file = Path(told.tcp_endpoint_file)
        for _ in range(int(MEDIA_CACHE_START_S / POLL_S)):
            if endpoint_file.exists():
                break
            await asyncio.sleep(POLL_S)
        else:
            raise RuntimeError(f"the media cache does not come up: {cache.last_error() or output.tail()}")
        endpoint = endpoint_file.read_text()
        config_file.write_bytes(msgspec.json.encode(msgspec.structs.replace(told, tcp_endpoint=endpoint)))
        return endpoint

    async def start(
        self, module: str, config: bytes, env: dict[str, str], proxies: list[str], max_log_bytes: int
    ) -> int:
        """The pid of `python -m module`. config: JSON; it holds keys, so it is handed over in memory, not in a file."""
        self.set_proxies_file(proxies)
        self._output = LogFile(self._folder / "log", max_log_bytes)
        config_fd = os.memfd_create("config")
        try:
            os.write(config_fd, config)
            with self._output.open() as output:
                self._process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-m",
                    module,
                    f"/proc/self/fd/{config_fd}",
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env={**os.environ, **env},
                    pass_fds=(config_fd,),
                    start_new_session=True,
                )
        finally:
            os.close(config_fd)
        self._keeping = asyncio.create_task(self._output.keep_bounded())
        return self._process.pid

    async def set_proxies(self, endpoints: list[str]) -> None:
        self.set_proxies_file(endpoints)

    def set_proxies_file(self, endpoints: list[str]) -> None:
        write_endpoints(self._folder / "proxies", endpoints)

    async def endpoint(self) -> str | None:
        """The control endpoint that a proxy has bound; None when it ended before it bound one."""
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
        return ProcessEnd(self._process.pid, returncode, self._output.tail())

    async def terminate(self) -> None:
        """When it has finished what is under way."""
        self._signal(signal.SIGTERM)

    async def stop(self) -> None:
        """At once."""
        self._signal(signal.SIGINT)

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def close(self) -> None:
        if self._keeping is not None:
            self._keeping.cancel()
        if self._media_cache is not None and self._keeping_cache is not None:
            self._media_cache.kill()
            self._keeping_cache.cancel()
        shutil.rmtree(self._folder, ignore_errors=True)
