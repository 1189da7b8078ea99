"""`python -m bench.stream_readers PORT MODEL N`: N streamed completions, read to nowhere until killed.

Prints a line when all have begun. A stream that ends is begun again, so that there are always N.
"""

from __future__ import annotations

import asyncio
import json
import sys

from bench.load_process import step_aside

_MAX_TOKENS = 2000
_SOME = 16_384


async def main(port: int, model: str, num_streams: int) -> None:
    begun = [asyncio.Event() for _ in range(num_streams)]
    async with asyncio.TaskGroup() as tasks:
        for number in range(num_streams):
            tasks.create_task(read_forever(port, model, number, begun[number]))
        for event in begun:
            await event.wait()
        print("all have begun", flush=True)


async def read_forever(port: int, model: str, number: int, begun: asyncio.Event) -> None:
    """Raises RuntimeError when the server refuses or ends a stream with an error."""
    body = json.dumps(
        {
            "model": model,
            "prompt": [4 + number % 1000] * 8,
            "max_tokens": _MAX_TOKENS,
            "ignore_eos": True,
            "stream": True,
        }
    )
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    while True:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write((head + body).encode())
        status = await reader.readline()
        if b" 200 " not in status:
            raise RuntimeError(f"a stream was refused: {status!r}")
        tail = b""
        while piece := await reader.read(_SOME):
            begun.set()
            tail = (tail + piece)[-200:]
        if b"data: [DONE]" not in tail:
            raise RuntimeError(f"a stream ended early: {tail!r}")
        writer.close()


if __name__ == "__main__":
    step_aside()
    asyncio.run(main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
