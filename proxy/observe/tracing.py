"""OpenTelemetry: one span for each request and one for each of its stages, made when the request has ended.

A client's W3C traceparent becomes the parent span, with its sampling decision. opentelemetry
(`pip install tandem-serve[tracing]`) is imported only where traces are configured. Its own thread sends them, and drops
them when the collector does not accept them.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from tandem.runtime.errors import ConfigError
from tandem.telemetry.request_log import RequestRecord

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

_EXPORT_TIMEOUT_S = 5
_INTERVAL_MS = 1000


class RequestTracer:
    """Call `on_end` on the loop. `close` blocks until the remaining spans are sent, for a limited time."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("tandem")

    def on_end(self, record: RequestRecord) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        parent = TraceContextTextMapPropagator().extract({"traceparent": record.traceparent})
        span = self._tracer.start_span(
            record.api,
            context=parent,
            kind=SpanKind.SERVER,
            start_time=_ns(record, record.arrived_at),
            attributes={
                "tandem.request_id": record.request_id,
                "tandem.outcome": record.outcome,
                "gen_ai.usage.input_tokens": record.num_prompt_tokens,
                "gen_ai.usage.output_tokens": record.num_completion_tokens,
                "tandem.cached_tokens": record.num_cached_tokens,
            },
        )
        if record.outcome not in ("stop", "length"):
            span.set_status(Status(StatusCode.ERROR, record.outcome))
        for index, timer in enumerate(record.sequences):
            self._add_stages(record, span, index, timer.stages or {})
        assert record.ended_at is not None
        span.end(_ns(record, record.ended_at))

    def _add_stages(self, record: RequestRecord, parent: Span, index: int, stages: dict[str, float]) -> None:
        """Adds the stages as consecutive spans. Detokenising runs during decode but is shown after it."""
        from opentelemetry.trace import set_span_in_context

        context = set_span_in_context(parent)
        moment = record.arrived_at
        for name, seconds in stages.items():
            if seconds > 0:
                attributes = {"tandem.sequence": index}
                start = _ns(record, moment)
                span = self._tracer.start_span(name, context=context, start_time=start, attributes=attributes)
                moment += seconds
                span.end(_ns(record, moment))

    def close(self) -> None:
        self._provider.shutdown()


def make_tracer(endpoint: str, process_name: str) -> RequestTracer:
    """endpoint: URL for OTLP over HTTP. Raises ConfigError for another URL, or where the packages are missing."""
    if not endpoint.startswith(("http://", "https://")):
        raise ConfigError(f"otlp_endpoint: {endpoint!r} is not an http URL; write http://HOST:4318/v1/traces")
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError("otlp_endpoint needs opentelemetry: pip install 'tandem-serve[tracing]'") from error
    logging.getLogger("opentelemetry").setLevel(logging.ERROR)
    resource: Any = Resource.create({"service.name": "tandem", "service.instance.id": process_name})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    exporter = OTLPSpanExporter(endpoint=endpoint, timeout=_EXPORT_TIMEOUT_S)
    provider.add_span_processor(
        BatchSpanProcessor(exporter, schedule_delay_millis=_INTERVAL_MS, export_timeout_millis=1000 * _EXPORT_TIMEOUT_S)
    )
    return RequestTracer(provider)


def _ns(record: RequestRecord, moment: float) -> int:
    """Returns wall-clock nanoseconds for a moment of the monotonic clock."""
    return int((record.arrived_unix_s + moment - record.arrived_at) * 1e9)
