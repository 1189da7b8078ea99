"""A dealer socket reports broken connections, but not its own close or a failed first connection. Real TCP."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tandem.protocol.codec import Codec
from tandem.protocol.messages.membership import GetTimeline
from tandem.protocol.network import NetworkConfig
from tandem.protocol.sockets import DealerSocket, RouterSocket, new_context
from tests.support.waiting import until

CODEC: Codec[GetTimeline] = Codec(GetTimeline)
LIMIT_S = 60


def test_a_broken_connection_loses_messages_in_flight_and_is_reported() -> None:
    async def main() -> None:
        context = new_context("worker", NetworkConfig(insecure=True))
        received: list[str] = []
        num_breaks = 0

        def on_message(_identity: bytes, message: GetTimeline) -> None:
            received.append(message.request_id)

        def on_broken() -> None:
            nonlocal num_breaks
            num_breaks += 1

        router = RouterSocket(context, "tcp://127.0.0.1:0", CODEC, on_message)
        endpoint = router.endpoint
        dealer = DealerSocket(context, endpoint, CODEC, lambda message: None, b"dealer", on_broken=on_broken)
        try:
            dealer.send(GetTimeline("first"))
            await until(lambda: received == ["first"])
            assert num_breaks == 0
            router.close()
            await until(lambda: num_breaks == 1)
            dealer.send(GetTimeline("second"))
            while router._closed:
                try:
                    router = RouterSocket(context, endpoint, CODEC, on_message)
                except Exception:  # the port is not free yet
                    await asyncio.sleep(0.01)
            await until(lambda: received == ["first", "second"])
            assert num_breaks == 1
        finally:
            dealer.close()
            router.close()
            context.destroy(linger=0)
        assert num_breaks == 1, "its own close is not reported"

    asyncio.run(asyncio.wait_for(main(), LIMIT_S))


def test_what_a_socket_has_queued_for_a_dead_peer_does_not_reach_its_successor(tmp_path: Path) -> None:
    """It would arrive by a connection of the same identity, which takes over the replies of the new one."""

    async def main() -> None:
        context, endpoint = new_context(), f"ipc://{tmp_path}/worker"
        received: list[tuple[str, bool]] = []

        def on_message(_identity: bytes, message: GetTimeline) -> None:
            received.append((message.request_id, router.send(b"proxy", message)))

        answers: list[str] = []
        old = DealerSocket(context, endpoint, CODEC, lambda message: None, b"proxy")
        old.send(GetTimeline("for the dead"))
        old.close(discard=True)
        router = RouterSocket(context, endpoint, CODEC, on_message)
        new = DealerSocket(context, endpoint, CODEC, lambda message: answers.append(message.request_id), b"proxy")
        new.send(GetTimeline("for the living"))
        await until(lambda: answers == ["for the living"])
        await asyncio.sleep(0.4)  # longer than a closing socket delivers
        assert received == [("for the living", True)]
        new.close()
        router.close()
        context.destroy(linger=0)

    asyncio.run(asyncio.wait_for(main(), LIMIT_S))
