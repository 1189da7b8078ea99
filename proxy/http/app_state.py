"""The parts of a proxy that its HTTP routes and its control socket use."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.proxy.cluster.readiness import WorkerReadiness
from tandem.proxy.dispatch.generation import GenerationServices
from tandem.proxy.http.bodies import RequestBodies
from tandem.proxy.http.whole_answers import WholeAnswers
from tandem.proxy.observe.timelines import Timelines
from tandem.proxy.reading.media_pool import MediaPool


@dataclass(frozen=True, slots=True)
class AppState(GenerationServices):
    """media: None where the model takes text only."""

    bodies: RequestBodies
    answers: WholeAnswers
    readiness: WorkerReadiness
    timelines: Timelines
    media: MediaPool | None
