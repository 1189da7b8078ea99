"""The proxy in front of vLLM's own prefill/decode pair, between servers that answer as vLLM does."""

from __future__ import annotations

from typing import Any

from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer

from bench.support.vllm_pair import REMOTE_DECODE, proxy

KV = {"do_remote_prefill": True, "remote_engine_id": "e"}


def vllm(bodies: list[dict[str, Any]]) -> TestServer:
    async def complete(request: web.Request) -> web.Response:
        bodies.append(await request.json())
        if bodies[-1]["model"] != "m":
            return web.json_response({"error": {"message": "no such model"}}, status=404)
        return web.json_response({"text": "hello", "kv_transfer_params": KV})

    app = web.Application()
    app.router.add_post("/v1/completions", complete)
    return TestServer(app)


async def test_each_prompt_is_computed_by_the_first_and_decoded_by_the_second() -> None:
    first: list[dict[str, Any]] = []
    second: list[dict[str, Any]] = []
    async with vllm(first) as prefill, vllm(second) as decode, ClientSession() as session:
        urls = [str(each.make_url("")) for each in (prefill, decode)]
        async with TestServer(proxy(session, *urls)) as front:
            body = {"model": "m", "prompt": "Hi", "max_tokens": 9, "stream": True, "stream_options": {}}
            url = front.make_url("/v1/completions")
            async with session.post(url, json=body) as answer:
                assert (answer.status, (await answer.json())["text"]) == (200, "hello")
            async with session.post(url, json={**body, "model": "n"}) as answer:
                assert (answer.status, await answer.json()) == (404, {"error": {"message": "no such model"}})
    assert first[0] == {
        "model": "m", "prompt": "Hi", "max_tokens": 1, "stream": False, "kv_transfer_params": REMOTE_DECODE,
    }  # fmt: skip
    assert second == [{**body, "kv_transfer_params": KV}], "a prompt that is refused is not decoded"
