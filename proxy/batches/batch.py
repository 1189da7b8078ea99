"""A batch: its object and the lines of its results. Pure."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from tandem.proxy.api.schema import Metadata, doc

WINDOW_S = 24 * 3600

Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]
Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
FINAL: tuple[Status, ...] = ("failed", "completed", "expired", "cancelled")


class BatchRequest(msgspec.Struct, kw_only=True):
    """OpenAI's `/v1/batches`."""

    input_file_id: Annotated[str, doc("an uploaded file of JSON lines with custom_id, method, url and body")]
    endpoint: Annotated[Endpoint, doc("the url of all lines")]
    completion_window: Annotated[Literal["24h"], doc("requests that have not ended by then are not run")]
    metadata: Annotated[Metadata | None, doc("returned with the batch")] = None


class LineError(msgspec.Struct, frozen=True):
    code: str
    message: str
    line: int | None = None
    param: str | None = None


class LineErrors(msgspec.Struct, frozen=True):
    data: list[LineError]
    object: Literal["list"] = "list"


class RequestCounts(msgspec.Struct, frozen=True):
    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchObject(msgspec.Struct, frozen=True, kw_only=True):
    """OpenAI's batch object."""

    id: str
    endpoint: Endpoint
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    status: Status = "validating"
    output_file_id: str | None = None
    error_file_id: str | None = None
    errors: LineErrors | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = RequestCounts()
    metadata: dict[str, str] | None = None
    object: Literal["batch"] = "batch"

    def became(self, status: Status, now: float, **changes: Any) -> BatchObject:
        """Returns the batch with another status and the time at which it got it."""
        return msgspec.structs.replace(self, status=status, **{f"{status}_at": int(now)}, **changes)

    def with_errors(self, now: float, errors: list[LineError]) -> BatchObject:
        """Returns the failed batch: its input is wrong."""
        return self.became("failed", now, errors=LineErrors(errors))


class LineResponse(msgspec.Struct, frozen=True):
    status_code: int
    request_id: str
    body: msgspec.Raw


class Failure(msgspec.Struct, frozen=True):
    code: str
    message: str


class LineResult(msgspec.Struct, frozen=True):
    """error: set for requests that were not run, and, beside the last answer, for those that were not in time."""

    id: str
    custom_id: str
    response: LineResponse | None
    error: Failure | None = None

    @property
    def is_success(self) -> bool:
        return self.response is not None and self.response.status_code == 200
