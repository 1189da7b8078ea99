"""Ids of the calls in answers, in all three APIs, whole and streamed."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any, cast

import pytest

from tandem.proxy.answers.chat import ParsedAnswers
from tandem.proxy.answers.messages import MessageAnswers
from tandem.proxy.answers.responses import ResponseAnswers
from tandem.proxy.dispatch.generation import Generation
from tandem.proxy.reading.body_reader import BodyKind, BodyReader
from tandem.proxy.text.model_text import ModelText
from tandem.telemetry.request_log import RequestRecord
from tests.support.proxy_cluster import Cluster, played, whole
from tests.support.settings import proxy_config
from tests.unit.proxy.answers.test_parsed_answers import CALL, generate

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
BODIES: dict[BodyKind, dict[str, Any]] = {
    "chat": {
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}],
    },
    "message": {
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [{"name": "f", "input_schema": SCHEMA}],
        "max_tokens": 200,
    },
    "response": {"input": "hi", "tools": [{"type": "function", "name": "f", "parameters": SCHEMA}]},
}
USUAL = {"chat": "call_[0-9a-f]{24}", "message": "toolu_[0-9a-f]{24}", "response": "call_[0-9a-f]{24}"}


def answers_to(cluster: Cluster, kind: BodyKind, stream: bool) -> ParsedAnswers:
    reader = BodyReader(cast(ModelText, cluster.text), proxy_config(tool_call_parser="hermes"))
    body = json.dumps(BODIES[kind] | {"stream": stream}).encode()
    request = reader.read(body, kind, cluster.worker_table.limits())
    generation = Generation(cluster.services, request, RequestRecord("r", "chat"))
    if kind == "response":
        return ResponseAnswers(generation, "m", None, "")
    return (MessageAnswers if kind == "message" else ParsedAnswers)(generation, "m")


@pytest.mark.parametrize("is_short", [False, True])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", list(BODIES))
@played(max_model_len=400)
async def test_ids_have_the_form_that_the_template_takes(
    cluster: Cluster, kind: BodyKind, stream: bool, is_short: bool
) -> None:
    cluster.text.requires_short_call_ids = is_short
    answers = answers_to(cluster, kind, stream)

    async def streamed() -> bytes:
        return b"".join([event async for event in answers.events()])

    task = asyncio.create_task(streamed() if stream else whole(answers))
    await generate(cluster, CALL * 2)
    field = "call_id" if kind == "response" else "id"
    form = "[a-zA-Z0-9]{9}" if is_short else USUAL[kind]
    assert len(set(re.findall(rf'"{field}":"({form})"', (await task).decode()))) == 2
