"""Requests with media at a real proxy: text does not wait, a full queue refuses, a lost process is replaced."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path

import httpx
import pytest

from tests.support.cluster import children_of, is_alive
from tests.support.media_proxy import MediaProxy, data_url, image_part, media_proxy
from tests.support.vision_model import encoded, picture
from tests.support.waiting import wait_until

PATIENCE_S = 120.0


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MediaProxy]:
    with media_proxy(tmp_path_factory.mktemp("media"), max_waiting_media=2) as running:
        yield running


def an_image(seed: int) -> dict[str, object]:
    return image_part(data_url(encoded(picture(seed=seed))))


def test_text_is_served_while_images_wait_and_a_full_queue_refuses(served: MediaProxy) -> None:
    assert served.chat(an_image(1)).status_code == 200
    [item] = served.dispatched().media
    assert item.kind == "image"
    pid = served.media_process()
    with ThreadPoolExecutor(3) as clients:
        os.kill(pid, signal.SIGSTOP)
        try:
            sent = [clients.submit(served.chat, an_image(2 + i)) for i in range(3)]
            [refused] = wait(sent, PATIENCE_S, return_when=FIRST_COMPLETED).done  # the one that came last
            answer = refused.result()
            assert answer.status_code == 503 and "retry-after" in answer.headers
            assert "2 requests with images or video are waiting already" in answer.text
            assert served.chat("text").status_code == 200 and served.dispatched().media == ()
        finally:
            os.kill(pid, signal.SIGCONT)
        assert sorted(future.result(PATIENCE_S).status_code for future in sent) == [200, 200, 503]
    wait_until(lambda: served.cache_status().num_leases == 0, PATIENCE_S)


def test_a_lost_media_process_costs_no_request_and_is_replaced(served: MediaProxy) -> None:
    assert served.chat(an_image(20)).status_code == 200
    pid = served.media_process()
    with ThreadPoolExecutor(1) as clients:
        os.kill(pid, signal.SIGSTOP)
        lost = clients.submit(served.chat, an_image(21))
        os.kill(pid, signal.SIGKILL)
        answer = lost.result(PATIENCE_S)
    assert answer.status_code == 200, answer.text
    assert served.chat("text").status_code == 200
    assert served.chat(an_image(22)).status_code == 200 and served.media_process() != pid
    wait_until(lambda: served.cache_status().num_leases == 0, PATIENCE_S)


@pytest.mark.parametrize("victim", ["sandboxes", "fork server"])
def test_lost_children_of_the_media_process_cost_no_request(served: MediaProxy, victim: str) -> None:
    """Lost sandboxes are forked again. Without their fork server the process starts again itself."""
    assert served.chat(an_image(24)).status_code == 200
    pid = served.media_process()
    fork_server, *sandboxes = sorted(children_of(pid))
    assert len(sandboxes) == 2
    for child in sandboxes if victim == "sandboxes" else [fork_server, *sandboxes]:
        os.kill(child, signal.SIGKILL)
    assert served.chat(an_image(25)).status_code == 200
    assert (served.media_process() == pid) == (victim == "sandboxes")
    wait_until(lambda: served.cache_status().num_leases == 0, PATIENCE_S)


def test_text_that_mentions_image_url_is_served_as_text(served: MediaProxy) -> None:
    before = served.cache_status()
    assert served.chat('say "image_url"').status_code == 200
    after = served.cache_status()
    assert (before.num_hits, before.num_misses) == (after.num_hits, after.num_misses)
    tokenized = httpx.post(
        f"{served.url}/tokenize", json={"messages": [{"role": "user", "content": [an_image(1)]}]}, timeout=PATIENCE_S
    )
    assert tokenized.status_code == 400 and "supports text only" in tokenized.text


def test_tokens_of_a_message_with_an_image_are_counted(served: MediaProxy) -> None:
    def body(media_type: str, data: str) -> dict[str, object]:
        source = {"type": "base64", "media_type": media_type, "data": data}
        content = [{"type": "image", "source": source}, {"type": "text", "text": "what is it?"}]
        return {"messages": [{"role": "user", "content": content}], "max_tokens": 1}

    data = data_url(encoded(picture(seed=50))).partition(",")[2]
    lines = "\n".join(data[i : i + 76] for i in range(0, len(data), 76))
    counts = []
    for media_type, given in (("image/png", data), ("image/jpg", lines), ("IMAGE/PNG", data.rstrip("="))):
        counted = httpx.post(f"{served.url}/v1/messages/count_tokens", json=body(media_type, given), timeout=PATIENCE_S)
        assert counted.status_code == 200, counted.text
        counts.append(counted.json()["input_tokens"])
    answered = httpx.post(f"{served.url}/v1/messages", json=body("image/png", data), timeout=PATIENCE_S).json()
    usage = answered["usage"]
    assert counts == [usage["input_tokens"] + usage["cache_read_input_tokens"]] * 3
    wrong = httpx.post(f"{served.url}/v1/messages/count_tokens", json=body("image/png", "A*"), timeout=PATIENCE_S)
    assert wrong.status_code == 400 and "not valid base64" in wrong.text
    wait_until(lambda: served.cache_status().num_leases == 0, PATIENCE_S)


def test_requests_that_miss_the_ttft_slo_are_refused(tmp_path: Path) -> None:
    with media_proxy(tmp_path, ttft_slo_ms=500) as served:
        pid = served.media_process()
        os.kill(pid, signal.SIGSTOP)
        try:
            answer = served.chat(an_image(1))
            assert answer.status_code == 503 and answer.json()["error"]["code"] == "ttft_slo_unreachable"
            assert "retry-after" in answer.headers
            assert served.chat("text").status_code == 200
        finally:
            os.kill(pid, signal.SIGCONT)


def test_a_frozen_media_process_is_replaced(served: MediaProxy) -> None:
    assert served.chat(an_image(40)).status_code == 200
    pid = served.media_process()
    os.kill(pid, signal.SIGSTOP)
    answer = served.chat(an_image(41))
    assert answer.status_code == 200, "it was read again"
    assert not is_alive(pid)
    assert served.chat(an_image(42)).status_code == 200
