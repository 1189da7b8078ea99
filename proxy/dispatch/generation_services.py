"""The parts of a proxy that every request for generation uses."""

from __future__ import annotations

from dataclasses import dataclass, field

from tandem.proxy.admission.admission import Admission
from tandem.proxy.admission.answer_budget import AnswerBudget
from tandem.proxy.cluster.worker_table import WorkerTable
from tandem.proxy.dispatch.dispatcher import Dispatcher
from tandem.proxy.reading.reader_pool import ReaderPool
from tandem.proxy.records.record_store import RecordStore
from tandem.proxy.text.model_text import ModelText
from tandem.proxy.text.token_text import TokenText
from tandem.telemetry.proxy_metrics import ProxyMetrics
from tandem.telemetry.request_log import RequestLog


@dataclass(frozen=True, slots=True)
class GenerationServices:
    """What `Generation` and `BeamGeneration` use."""

    text: ModelText
    token_text: TokenText
    readers: ReaderPool
    worker_table: WorkerTable
    admission: Admission
    answer_budget: AnswerBudget
    dispatcher: Dispatcher
    metrics: ProxyMetrics
    requests: RequestLog
    request_timeout_s: float
    ttft_slo_s: float | None
    """A request whose first token is predicted later is refused; None for no SLO."""
    records: RecordStore | None = field(default=None, kw_only=True)
    """None where no requests are recorded."""
