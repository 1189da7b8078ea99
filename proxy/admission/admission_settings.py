"""Limits on waiting and running requests, as the operator sets them."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from tandem.runtime.settings import setting


class AdmissionSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of `Admission` and of what refuses requests before it."""

    # fmt: off
    max_waiting_requests: Annotated[int, setting("limits", ge=0, description=
        "Maximum number of sequences per proxy that wait for their first token; further requests get 503; 0 uses 1024 "
        "with workers on CPU and 4096 with GPUs.")] = 1024
    max_waiting_tokens: Annotated[int, Meta(ge=0)] = 16_000_000
    """Limit on the prompt tokens of these sequences together; 0 for none."""
    max_requests_per_client: Annotated[int, setting("limits", ge=0, description=
        "Maximum number of sequences in flight per proxy and API key (or client address without keys); "
        "further requests get 429; 0 means no limit.")] = 0
    soonest_priority: Annotated[int, Meta(ge=-100, le=0)] = -100
    """Soonest priority of any request; a request that asks for a sooner one gets this one."""
    ttft_slo_ms: Annotated[int, setting("limits", ge=0, description=
        "Refuse requests with 503 whose predicted time to first token exceeds this many milliseconds; 0 "
        "refuses none.")] = 0
    # fmt: on

    @property
    def ttft_slo_s(self) -> float | None:
        return self.ttft_slo_ms / 1000 or None
