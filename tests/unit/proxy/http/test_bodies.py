"""Bodies arrive whole, large ones in a temporary file, or are refused in time."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import Headers

from tandem.proxy.admission.budgets import DescriptorBudget
from tandem.proxy.answers.errors import BodyTooLarge, UnsupportedContentCoding
from tandem.proxy.answers.http_answers import ClientDisconnected
from tandem.proxy.http.bodies import MAX_UNSPOOLED_BYTES, RequestBodies
from tandem.proxy.reading.spooled_body import SpooledBody
from tandem.runtime.errors import ClientShareExceeded, Overloaded, TandemError
from tests.support.async_tests import in_loop

BODIES = RequestBodies(100_000, 30.0, max_spooled_bytes=150_000)


def feed(pieces: list[bytes], then: dict[str, Any] | None = None) -> Any:
    """Returns an ASGI receive function for these pieces; `then` replaces the last message."""
    messages: list[dict[str, Any]] = [{"type": "http.request", "body": piece, "more_body": True} for piece in pieces]
    messages.append(then or {"type": "http.request", "body": b"", "more_body": False})

    async def receive() -> dict[str, Any]:
        return messages.pop(0)

    return receive


async def read(pieces: list[bytes], headers: dict[str, str] | None = None) -> bytes:
    async with BODIES.receive(feed(pieces), Headers(headers or {})) as body:
        if isinstance(body, bytes):
            assert len(body) <= MAX_UNSPOOLED_BYTES
            return body
        assert BODIES._bytes.num_held == body.num_bytes > MAX_UNSPOOLED_BYTES
        whole = Path(body.path).read_bytes()
    assert not Path(body.path).exists()
    return whole


@given(st.lists(st.binary(max_size=1500).map(lambda piece: piece * 8), max_size=6))
def test_a_body_arrives_whole(pieces: list[bytes]) -> None:
    assert asyncio.run(read(pieces)) == b"".join(pieces)
    assert BODIES._bytes.num_held == 0


@in_loop
async def test_large_bodies_of_one_client_leave_room_for_those_of_another() -> None:
    budget = DescriptorBudget(256, 100, 20)
    bodies = RequestBodies(100_000, 30.0, max_spooled_bytes=200_000, descriptors=budget)

    async def hold(stack: AsyncExitStack, client: str, num_bytes: int) -> None:
        await stack.enter_async_context(bodies.receive(feed([b"a" * num_bytes]), Headers(), client))

    async with AsyncExitStack() as stack:
        await hold(stack, "a", 100_000)
        assert budget.num_held == 1
        await hold(stack, "a", 16_000)  # is no file
        assert budget.num_held == 1
        with pytest.raises(ClientShareExceeded, match="as many bytes"):
            await hold(stack, "a", 60_000)
        await hold(stack, "b", 60_000)
        with pytest.raises(Overloaded, match="too many large requests"):
            await hold(stack, "c", 60_000)
        with budget.hold("a", int(budget.room * 0.75) - 1), pytest.raises(ClientShareExceeded, match="descriptors"):
            await hold(stack, "a", 20_000)
    assert budget.num_held == 0 and not bodies._bytes.num_held and not bodies._bytes._by_client


DISCONNECT = {"type": "http.disconnect"}


@pytest.mark.parametrize(
    ("receive", "headers", "error"),
    [
        (feed([]), {"content-length": "100001"}, BodyTooLarge),
        (feed([b"a" * 50_000] * 3), {}, BodyTooLarge),
        (feed([b"a" * 50_000] * 3), {"content-length": "7"}, BodyTooLarge),
        (feed([b"a" * 50_000], DISCONNECT), {}, ClientDisconnected),
        (feed([b"a"], DISCONNECT), {}, ClientDisconnected),
        (feed([b"a"]), {"content-encoding": "gzip"}, UnsupportedContentCoding),
        (feed([b"a"]), {"content-encoding": "identity, br"}, UnsupportedContentCoding),
    ],
)
def test_refused_bodies_leave_no_file(receive: Any, headers: Any, error: type[TandemError]) -> None:
    async def run() -> None:
        with pytest.raises(error):
            async with BODIES.receive(receive, Headers(headers)):
                raise AssertionError("it was taken")

    asyncio.run(run())
    assert BODIES._bytes.num_held == 0


@in_loop
async def test_the_limit_holds_for_small_bodies_of_unknown_length() -> None:
    with pytest.raises(BodyTooLarge):
        async with RequestBodies(1024, 30.0).receive(feed([b"a" * 1025]), Headers()):
            raise AssertionError("it was taken")


@in_loop
async def test_large_bodies_together_are_limited() -> None:
    async with BODIES.receive(feed([b"a" * 90_000]), Headers()) as first:
        assert isinstance(first, SpooledBody)
        with pytest.raises(Overloaded):
            async with BODIES.receive(feed([b"b" * 90_000]), Headers()):
                pass
        assert await read([b"small"]) == b"small"
    assert len(await read([b"b" * 90_000])) == 90_000
