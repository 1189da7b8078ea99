"""The parts of a proxy that its HTTP routes and its control socket use."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.proxy.admission.client_slots import ClientSlots
from tandem.proxy.api.response_store import ResponseStore
from tandem.proxy.batches.runner import BatchRunner
from tandem.proxy.cluster.adapter_table import AdapterTable
from tandem.proxy.cluster.readiness import WorkerReadiness
from tandem.proxy.dispatch.generation import GenerationServices
from tandem.proxy.http.api_keys import ApiKeys
from tandem.proxy.http.bodies import RequestBodies
from tandem.proxy.observe.timelines import Timelines
from tandem.proxy.reading.media_pool import MediaPool


@dataclass(frozen=True, slots=True)
class AppState(GenerationServices):
    """api_keys: None lets every client in. calls: of `/tokenize` and `/detokenize` in flight. media: None where the
    model takes text only. responses, batches: None where none are stored."""

    calls: ClientSlots
    api_keys: ApiKeys | None
    bodies: RequestBodies
    readiness: WorkerReadiness
    timelines: Timelines
    media: MediaPool | None
    adapters: AdapterTable
    responses: ResponseStore | None
    batches: BatchRunner | None
