"""Interface between the launcher and the place where its processes run: this host or a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tandem.deploy.processes.supervisor import OnExit, Supervised
from tandem.protocol.messages.membership import Role

WORKER_MODULE = "tandem.worker"
VLLM_WORKER_MODULE = "tandem.vllm_worker"


class Site:
    """Base class of the sites. What a site need not do does nothing here."""

    on_gpus: bool
    """Whether the workers run on GPUs."""

    def __init__(self) -> None:
        self.progress_files: dict[str, Path] = {}
        """Loading progress of workers, by name, as far as it can be read on this host."""
        self.media_cache_endpoint = ""
        """Endpoint of the media cache on this host; empty if there is none."""

    def http_hosts(self) -> list[str]:
        """Addresses at which the proxies listen, as far as they are known and can be reached from here."""
        return []

    def make_proxy(self, name: str, on_exit: OnExit, on_endpoint: Callable[[str, str], None]) -> Supervised:
        """on_endpoint: called with name and control endpoint when it is known, and again when it changes."""
        raise NotImplementedError

    def make_worker(self, role: Role, name: str, on_exit: OnExit) -> Supervised:
        """Raises ConfigError when there are not enough resources for it."""
        raise NotImplementedError

    def make_media_cache(self, on_exit: OnExit) -> Supervised | None:
        """Called before the other processes are made. None if the model takes text only or the site has no cache."""
        return None

    def forget(self, name: str) -> None:
        """Releases the resources of a worker that has been stopped for good."""
        raise NotImplementedError

    def set_proxy_endpoints(self, endpoints: list[str]) -> None:
        """Passes the proxies' current control endpoints to all workers."""

    def set_role(self, name: str, role: Role) -> None:
        """Notes the current role of a worker, which it keeps when it is restarted."""

    @property
    def is_preloaded(self) -> bool:
        """Whether workers can start: what they need has been imported, or each imports it for itself."""
        return True

    def renew_preloaded(self) -> None:
        """Lets workers that are started from now on have the code that is installed now."""

    def stop_listening(self) -> None:
        """Closes the listening sockets, before the proxies are stopped."""

    def close(self) -> None:
        """Ends what the site itself has begun."""
