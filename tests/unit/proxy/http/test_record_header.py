"""X-Tandem-Record: its values, what it cannot be combined with, and the answer's header."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import unquote

import pytest

from tandem.proxy.http.routes.records import PATH, RECORD_HEADER, check_recorded, record_header, wants_record
from tandem.proxy.records.record_store import RecordStore
from tandem.runtime.errors import InvalidRequest
from tests.support.proxy_cluster import Cluster, played

STORE: Any = RecordStore.__new__(RecordStore)


def test_one_asks_for_a_record_and_zero_does_not() -> None:
    for kind in ("completion", "chat", "response", "message"):
        assert wants_record("1", kind, STORE)
        assert not wants_record("0", kind, STORE) and not wants_record(None, kind, STORE)
    assert not wants_record("0", "embedding", None)


@pytest.mark.parametrize("value", ["", "true", "2", "1, 1", " 1", "x" * 50_000])
def test_other_values_are_refused(value: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        wants_record(value, "chat", STORE)
    assert refused.value.param == RECORD_HEADER and len(refused.value.message) < 200


@played()
async def test_what_cannot_be_recorded_is_refused_with_the_reason(cluster: Cluster) -> None:
    with pytest.raises(InvalidRequest, match="no folder for records"):
        wants_record("1", "chat", None)
    with pytest.raises(InvalidRequest, match="an embedding has no tokens"):
        wants_record("1", "embedding", STORE)
    for beams in (False, True):
        body = json.dumps({"prompt": "abc", "use_beam_search": beams, "temperature": 0}).encode()
        request = cluster.reader.read(body, "completion", cluster.worker_table.limits())
        if beams:
            with pytest.raises(InvalidRequest, match="not supported with use_beam_search"):
                check_recorded(request)
        else:
            check_recorded(request)


@pytest.mark.parametrize("request_id", ["a", "a/b", "..", "%2F", "?x=1#y", "\"'<>", "~" * 128])
def test_the_answer_says_where_its_record_is(request_id: str) -> None:
    path = record_header(request_id)[RECORD_HEADER]
    assert path.startswith(f"{PATH}/") and unquote(path.removeprefix(f"{PATH}/")) == request_id
    assert not set(path) & set(" ?#\"'<>")
