"""vLLM's own prefill/decode pair on CPUs: two servers with a core each, NIXL between them, and a proxy in front.

    python -m bench.support.vllm_pair VENV MODEL PORT

The proxy has each prompt computed by the first server, with one token of output, and gives the second one the request
with the KV parameters that the first has answered. SIGTERM or Ctrl-C stops all three; so does a server that ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

from aiohttp import ClientError, ClientSession, ClientTimeout, TCPConnector, web

from bench.support.servers import START_TIMEOUT_S, vllm_serve

KV_TRANSFER = '{"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}'
REMOTE_DECODE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    **dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")),
}


def start(venv: Path, model: Path, port: int, core: int) -> subprocess.Popen[bytes]:
    """Starts the server of `core`; its side channel has the port 600 above its own."""
    command, env = vllm_serve(venv, model, port, "--kv-transfer-config", KV_TRANSFER)
    env |= {"VLLM_CPU_OMP_THREADS_BIND": str(core), "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port + 600)}
    return subprocess.Popen(command, env={**os.environ, **env})


async def wait_until_up(session: ClientSession, url: str, process: subprocess.Popen[bytes]) -> None:
    """Raises SystemExit if the process ends or is not up within START_TIMEOUT_S."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise SystemExit(f"the server at {url} ended with status {process.returncode}")
        with contextlib.suppress(ClientError):
            async with session.get(f"{url}/health") as answer:
                if answer.status == 200:
                    return
        await asyncio.sleep(1)
    raise SystemExit(f"the server at {url} was not up within {START_TIMEOUT_S:.0f} s")


def proxy(session: ClientSession, prefill: str, decode: str) -> web.Application:
    async def generate(request: web.Request) -> web.StreamResponse:
        body: dict[str, Any] = await request.json()
        headers = {"X-Request-Id": uuid.uuid4().hex}
        first = {**body, "stream": False, "max_tokens": 1, "kv_transfer_params": REMOTE_DECODE}
        first.pop("stream_options", None)
        async with session.post(prefill + request.path, json=first, headers=headers) as answer:
            if answer.status != 200:
                return web.Response(status=answer.status, body=await answer.read(), content_type="application/json")
            body["kv_transfer_params"] = (await answer.json())["kv_transfer_params"]
        async with session.post(decode + request.path, json=body, headers=headers) as answer:
            response = web.StreamResponse(
                status=answer.status, headers={"Content-Type": answer.headers["Content-Type"]}
            )
            await response.prepare(request)
            async for chunk in answer.content.iter_any():
                await response.write(chunk)
            await response.write_eof()
            return response

    app = web.Application(client_max_size=1 << 28)
    app.router.add_post("/v1/completions", generate)
    return app


async def serve(venv: Path, model: Path, port: int) -> None:
    urls = [f"http://127.0.0.1:{port + 1 + core}" for core in range(2)]
    this = asyncio.current_task()
    assert this is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, this.cancel)
    servers: list[subprocess.Popen[bytes]] = []
    async with ClientSession(timeout=ClientTimeout(total=None), connector=TCPConnector(limit=0)) as session:
        try:
            for core, url in enumerate(urls):  # one after the other: they would starve each other
                servers.append(start(venv, model, port + 1 + core, core))
                await wait_until_up(session, url, servers[-1])
            runner = web.AppRunner(proxy(session, *urls))
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", port).start()
            print(f"vLLM's prefill/decode pair is on http://127.0.0.1:{port}", flush=True)
            ends = [asyncio.create_task(asyncio.to_thread(each.wait)) for each in servers]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            print("a server has ended", file=sys.stderr)
        finally:
            for each in servers:
                each.terminate()


if __name__ == "__main__":
    if len(sys.argv) != 4:
        raise SystemExit("usage: python -m bench.support.vllm_pair VENV MODEL PORT")
    with contextlib.suppress(asyncio.CancelledError, KeyboardInterrupt):
        asyncio.run(serve(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])))
