"""Attacks with pictures, on a cluster with a small media cache: one client holds as much of it as it can."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.security.attacker import Attack, Attacker
from tests.support.cluster import MODEL
from tests.support.media_proxy import data_url, image_part
from tests.support.vision_model import encoded, picture

CACHE_MIB = 8


def chat(*parts: dict[str, Any] | str, **fields: Any) -> dict[str, Any]:
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 1,
        "timeout": 20,
        **fields,
    }


def shown(number: int, width: int = 140, height: int = 140) -> dict[str, Any]:
    return image_part(data_url(encoded(picture(width, height, seed=1000 + number), "JPEG"), "image/jpeg"))


def waiting_pictures(attacker: Attacker) -> None:
    """Chats with a small picture each, before a prompt of its own that takes long."""
    words = "lorem ipsum dolor sit amet " * 60
    bodies = [chat(shown(number), f"{number} {words}") for number in range(130)]
    attacker.send_all("/v1/chat/completions", bodies, at_once=130)


def large_pictures(attacker: Attacker) -> None:
    """Pictures that take a seventh of the cache each, or all of it together in one request."""
    bodies = [chat(shown(number, 350, 420), "what?") for number in range(200, 260)]
    bodies += [chat(*(shown(300 + number, 350, 420) for number in range(8)), "what?")] * 4
    attacker.send_all("/v1/chat/completions", bodies, at_once=64)


def answered_pictures(attacker: Attacker) -> None:
    """Streams that go on for long after their pictures were encoded; half of them hang up at different moments."""
    bodies = [chat(shown(number), "go on", max_tokens=600, ignore_eos=True, n=2) for number in range(400, 480)]

    def send(numbered: tuple[int, dict[str, Any]]) -> None:
        number, body = numbered
        attacker.send("/v1/chat/completions", body | {"timeout": 20 if number % 2 else 0.1 * (number % 40) + 0.01})

    with ThreadPoolExecutor(80) as threads:
        list(threads.map(send, enumerate(bodies)))


MEDIA_ATTACKS = [
    Attack(waiting_pictures, max_gap_s=8.0, max_grown_bytes=1 << 30),  # the media process decodes
    Attack(large_pictures, max_gap_s=8.0, max_grown_bytes=1 << 30),
    Attack(answered_pictures, max_gap_s=8.0, max_grown_bytes=1 << 30),
]
