"""Requests that match or nearly match `/openapi.json` get answers that match it: no 5xx, no hang."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode, checks
from schemathesis.specs.openapi import checks as openapi_checks

from tests.support.cluster import MODEL, Cluster
from tests.support.openapi import openapi_of

CHECKS = [
    checks.not_a_server_error,
    openapi_checks.status_code_conformance,
    openapi_checks.content_type_conformance,
    openapi_checks.response_headers_conformance,
    openapi_checks.response_schema_conformance,
    openapi_checks.negative_data_rejection,
]
HANG_S = 120.0
CONSTRAINTS = ("response_format", "structured_outputs", "tools")
"""Fields that exclude each other, which the schema cannot express."""
DOCUMENT = openapi_of(MODEL, has_api_key=False)
OPERATIONS = [result.ok() for result in schemathesis.openapi.from_dict(DOCUMENT).get_all_operations()]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Sequences are short, because a request may ask for the longest output."""
    folder = str(tmp_path_factory.mktemp("data"))
    with Cluster("--max-model-len", "64", "--trust-request-chat-template", "--data-dir", folder) as running:
        yield running


def test_the_server_returns_the_openapi_document(cluster: Cluster) -> None:
    assert httpx.get(f"{cluster.url}/openapi.json").json() == json.loads(json.dumps(DOCUMENT))


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.label)
def test_answers_match_the_openapi_document(cluster: Cluster, operation: Any, mode: GenerationMode) -> None:
    has_body = bool(operation.body)
    if mode is GenerationMode.NEGATIVE and not has_body:
        pytest.skip("there is nothing to get wrong")

    statuses: Counter[int] = Counter()

    @settings(
        max_examples=20 if has_body else 3,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def ask(case: Any) -> None:
        if mode is GenerationMode.POSITIVE and isinstance(case.body, dict):
            kept = sum(statuses.values()) % (2 * len(CONSTRAINTS))  # every second case keeps one, the others none
            for number, field in enumerate(CONSTRAINTS):
                if 2 * number != kept:
                    case.body.pop(field, None)
            if "input_file_id" in case.body:
                form: dict[str, Any] = {"files": {"file": b"{}"}, "data": {"purpose": "batch"}}
                case.body["input_file_id"] = httpx.post(f"{cluster.url}/v1/files", **form).json()["id"]
            if case.body.get("use_beam_search"):  # wide beams take minutes here
                case.body["n"] = 2
        response = case.call(base_url=cluster.url, timeout=HANG_S)
        statuses[response.status_code] += 1
        if response.status_code in (503, 504) and isinstance(case.body, dict) and "timeout" in case.body:
            # The request's own timeout may be almost zero: refused when predicted, ended when reached.
            assert response.json()["error"]["code"] in ("ttft_slo_unreachable", "deadline_exceeded")
            return
        case.validate_response(response, checks=CHECKS)

    ask()
    if mode is GenerationMode.POSITIVE and "{" not in operation.path:
        assert statuses[200] > 0, "every request was refused, so no answer was checked"
