"""How long requests wait for workers, and which workers prompts go to, as the operator sets it."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from tandem.runtime.settings import setting


class RoutingSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of the worker table, the router and the dispatcher."""

    # fmt: off
    decode_prefill_threshold: Annotated[int, setting("workers", ge=0, le=65536, description=
        "A decode worker prefills prompts of up to this many uncached tokens itself; 0 leaves every "
        "prompt to prefill and elastic workers, and is the default for the demo model.")] = 64
    request_timeout_s: Annotated[float, setting("limits", gt=0, description=
        "Seconds after which an unfinished request fails.")] = 600.0
    worker_wait_s: Annotated[float, setting("limits", ge=0, description=
        "Seconds that requests wait while no worker of a role is available; then they get 503.")] = 60.0
    num_proxies: Annotated[int, Meta(ge=1)] = 1
    """Proxies that share the workers."""
    # fmt: on
