"""The parts of a proxy that its HTTP routes and its control socket use."""

from __future__ import annotations

from dataclasses import dataclass, field

from tandem.proxy.admission.budgets import ClientSlots, DescriptorBudget
from tandem.proxy.api.responses_api.response_store import ResponseStore
from tandem.proxy.batches.runner import BatchRunner
from tandem.proxy.cluster.adapter_table import AdapterTable
from tandem.proxy.dispatch.dispatcher import WorkerReadiness
from tandem.proxy.dispatch.generation import GenerationServices
from tandem.proxy.http.api_keys import ApiKeys
from tandem.proxy.http.bodies import RequestBodies
from tandem.proxy.observe.timelines import Timelines
from tandem.proxy.reading.media_pool import MediaPool


@dataclass(frozen=True, slots=True)
class AppState(GenerationServices):
    """The parts of a proxy that routes of all kinds use."""

    calls: ClientSlots
    """Calls of `/tokenize` and `/detokenize` in flight."""
    api_keys: ApiKeys | None
    """None lets every client in."""
    bodies: RequestBodies
    readiness: WorkerReadiness
    timelines: Timelines
    media: MediaPool | None
    """None where the model takes text only."""
    adapters: AdapterTable
    signing_key: bytes
    """Of the signatures of thinking blocks."""
    responses: ResponseStore | None
    """None where no responses are stored."""
    batches: BatchRunner | None
    """None where no files and batches are stored."""
    descriptors: DescriptorBudget = field(default_factory=DescriptorBudget)
