"""The page at `/` chats, stops, asks for the key and shows the path of a request."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import httpx

from tandem.proxy.answers.http_answers import TIMELINE_PREFIX
from tests.integration.test_observing import chromium
from tests.support.cluster import MODEL, Cluster

PAGE = Path(__file__).parents[2] / "proxy/http/routes/chat.html"
ADDRESS = "http://tandem.test"
KEY = "sk-page"
SHOTS = os.environ.get("TANDEM_SCREENSHOTS", "")
"""Folder that screenshots are written to; none are made without it."""
EVENTS: list[dict[str, Any]] = [
    {"at_s": 0.0, "event": "arrived"},
    {"at_s": 0.002, "event": "tokenized", "prompt_tokens": 24},
    {"at_s": 0.003, "event": "dispatched", "prefill": "prefill-0", "decode": "decode-0", "kv_shipped": True},
    {"at_s": 0.041, "event": "first token computed", "queue_s": 0.004, "prefill_s": 0.031},
    {"at_s": 0.05, "event": "decode began", "decode_wait_s": 0.001, "step_s": 0.006, "kv_bytes": 1_572_864},
    {"at_s": 0.2, "event": "attempt over", "attempt": "a"},
    {"at_s": 0.201, "event": "dispatched", "prefill": "prefill-0", "decode": "decode-1", "kv_shipped": True},
    {"at_s": 0.9, "event": "ended", "outcome": "stop"},
]


def stream() -> bytes:
    timeline = {"request_id": "r1", "outcome": "stop", "stages_s": {"transfer": 0.003}, "events": EVENTS}
    pieces = [{"choices": [{"delta": {"content": word}}]} for word in ("Once ", "upon ", "a time.")]
    events = [b"data: " + json.dumps(piece).encode() + b"\n\n" for piece in pieces]
    return b"".join([*events, TIMELINE_PREFIX + json.dumps(timeline).encode() + b"\n\n", b"data: [DONE]\n\n"])


def shot(page: Any, name: str) -> None:
    if SHOTS:
        page.screenshot(path=f"{SHOTS}/{name}.png")


def test_the_page_asks_for_the_key_and_shows_a_lost_worker() -> None:
    bodies: list[dict[str, Any]] = []

    def answer(route: Any) -> None:
        request = route.request
        if request.url == f"{ADDRESS}/":
            route.fulfill(body=PAGE.read_text().replace("TAKES_IMAGES", "yes"), content_type="text/html")
        elif request.headers.get("authorization") != f"Bearer {KEY}":
            route.fulfill(status=401, json={"error": {"message": "no key"}})
        elif request.url.endswith("/v1/models"):
            route.fulfill(json={"data": [{"id": "m"}]})
        else:
            assert request.headers["x-tandem-timeline"] == "1"
            bodies.append(request.post_data_json)
            route.fulfill(body=stream(), content_type="text/event-stream")

    with chromium() as browser:
        for name, width, scheme in (("chat", 1100, "light"), ("chat_phone", 390, "light"), ("chat_dark", 1100, "dark")):
            page = browser.new_page(viewport={"width": width, "height": 760}, color_scheme=scheme)
            troubles: list[str] = []
            page.on("pageerror", lambda error, troubles=troubles: troubles.append(str(error)))
            page.route("**/*", answer)
            page.goto(f"{ADDRESS}/")
            page.wait_for_selector("#key:visible", timeout=30_000)
            page.fill("#key", KEY)
            page.press("#key", "Tab")
            page.wait_for_selector("#model:text-is('m')", timeout=30_000)
            assert page.is_visible("#images")
            page.fill("[name=temperature]", "0.5")
            page.fill("#text", "Tell a story.")
            page.press("#text", "Enter")
            page.wait_for_selector("#events li:nth-child(8)", timeout=30_000)
            page.wait_for_selector("#stop:disabled", timeout=30_000)
            assert page.inner_text("#chat div:nth-child(2)") == "Once upon a time."
            assert "the stream goes on with another" in page.inner_text("#events li.bad")
            assert "prefill on prefill-0, decode on decode-1" in page.inner_text("#events")
            assert page.locator("#gaps i").count() == 2
            assert bodies[-1]["temperature"] == 0.5 and bodies[-1]["max_tokens"] == 256
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            assert not troubles
            shot(page, name)
            page.close()


SCRIPTED = """
window.bodies = [];
window.fetch = async (url, options) => {
  if (url === "/v1/models") return new Response(JSON.stringify({data: [{id: "m"}]}));
  window.bodies.push(JSON.parse(options.body));
  const deltas = [{reasoning: "Hm, "}, {reasoning: "yes."}, {content: "Once "}, {content: "upon"}];
  const events = deltas.map(delta => `data: ${JSON.stringify({choices: [{delta}]})}\\n\\n`).join("");
  return new Response(new ReadableStream({start(stream) {
    stream.enqueue(new TextEncoder().encode(events));
    options.signal.addEventListener("abort", () => stream.error(new DOMException("stopped", "AbortError")));
  }}));
};
"""
"""A server whose answer does not end."""


def test_thinking_is_shown_apart_and_a_new_chat_begins_empty() -> None:
    with chromium() as browser:
        page = browser.new_page()
        page.add_init_script(SCRIPTED)
        page.route("**/*", lambda route: route.fulfill(body=PAGE.read_text(), content_type="text/html"))
        page.goto(f"{ADDRESS}/")
        page.fill("#text", "a")
        page.press("#text", "Enter")
        page.wait_for_selector("#chat div > span:text-is('Once upon')", timeout=30_000)
        details = page.locator("#chat details")
        assert details.text_content() == "ThinkingHm, yes." and details.get_attribute("open") is None
        assert page.locator("#gaps i").count() == 3
        assert page.get_attribute("#chat", "aria-busy") == "true"
        page.click("#clear")
        page.wait_for_selector("#stop:disabled", timeout=30_000)
        assert page.get_attribute("#chat", "aria-busy") == "false"
        page.fill("#text", "b")
        page.press("#text", "Enter")
        page.wait_for_selector("#chat div > span:text-is('Once upon')", timeout=30_000)
        page.press("body", "Escape")
        page.wait_for_selector("#stop:disabled", timeout=30_000)
        page.fill("#text", "c")
        page.press("#text", "Enter")
        page.wait_for_function("window.bodies.length === 3", timeout=30_000)
        user, assistant = {"role": "user", "content": "b"}, {"role": "assistant", "content": "Once upon"}
        asked = [body["messages"] for body in page.evaluate("window.bodies")]
        assert asked[1:] == [[user], [user, assistant, {"role": "user", "content": "c"}]]


def test_the_page_chats_with_a_cluster_and_stops() -> None:
    with Cluster("--api-key", KEY) as cluster:
        with chromium() as browser:
            chat_and_stop(browser, cluster)
        cluster.wait_for(cluster.all_blocks_free)
        check_refused_timeline(cluster)


def chat_and_stop(browser: Any, cluster: Cluster) -> None:
    page = browser.new_page()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(f"{cluster.url}/")
    page.wait_for_selector("#key:visible", timeout=30_000)
    page.fill("#key", KEY)
    page.press("#key", "Tab")
    page.fill("[name=max_tokens]", "8")
    page.fill("#text", "Tell a story.")
    page.press("#text", "Enter")
    page.wait_for_selector("#events li:has-text('ended: ')", timeout=60_000)
    assert "queue" in page.inner_text("#events") and page.inner_text("#chat div:nth-child(2)")
    page.fill("[name=max_tokens]", "400")
    page.fill("#text", "Another.")
    page.press("#text", "Enter")
    page.wait_for_selector("#chat div:nth-child(4) span:not(:empty)", timeout=60_000)
    page.press("body", "Escape")
    page.wait_for_selector("#stop:disabled", timeout=30_000)
    assert page.inner_text("#sum") == "stopped by you"
    assert all(url.startswith((cluster.url, "data:", "blob:")) for url in asked)


def check_refused_timeline(cluster: Cluster) -> None:
    body = {"model": MODEL, "prompt": "Once", "max_tokens": 2}
    headers = {"authorization": f"Bearer {KEY}", "x-tandem-timeline": "yes"}
    refused = httpx.post(f"{cluster.url}/v1/completions", json=body, headers=headers, timeout=60)
    assert refused.status_code == 400 and "'yes'" in refused.text
