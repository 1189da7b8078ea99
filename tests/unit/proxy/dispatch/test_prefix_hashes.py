"""Proxies and workers compute the same hashes of a request; salts, adapters and media separate them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec

from tandem.decode_worker.sequence import DecodePrompt
from tandem.prefill_worker.prompt import PrefillPrompt
from tandem.protocol.messages.dispatch import AdapterRef, PrepareDecode, StartPrefill
from tandem.protocol.prefix_hash import pack_short_hashes
from tandem.proxy.api.generation_request import GenerationRequest
from tandem.proxy.cluster.adapter_table import NamedAdapter
from tandem.proxy.dispatch.generation import Generation
from tandem.proxy.text.prompt import AnyPrompt, CachedMedia, MediaPrompt, RenderedPrompts
from tandem.telemetry.request_log import RequestRecord
from tests.support.proxy_cluster import Cluster, played, turn

BLOCK_SIZE, MODEL_ID = 64, "m"  # of the workers of Cluster
TEXT = "@@@" + "a" * 140
ADAPTERS = [NamedAdapter(name, AdapterRef(name * 64, f"/adapters/{name}")) for name in "xy"]


def request_of(
    cluster: Cluster, cache_salt: str = "", scope: str = "", adapter: NamedAdapter | None = None, media: bytes = b""
) -> GenerationRequest:
    """media: digest of an image at the beginning of the prompt; b"" for none."""
    body = json.dumps({"prompt": TEXT, "max_tokens": 5, **({"cache_salt": cache_salt} if cache_salt else {})}).encode()
    request = cluster.reader.decode(body, "completion", scope)
    prompt: AnyPrompt = request.prompt
    if media:
        [placeholder] = cluster.text.ids("@")
        prompt = MediaPrompt(TEXT, [CachedMedia("image", media, "/proc/1/fd/2", (), 3)], {"image": placeholder})
    request = msgspec.structs.replace(request, adapter=adapter, prompt=prompt)
    return cluster.reader.render(request, cluster.worker_table.limits())


def variants(cluster: Cluster) -> dict[str, GenerationRequest]:
    """Requests with the same tokens, each with something else that separates its blocks from the others'."""
    return {
        "plain": request_of(cluster),
        "salt": request_of(cluster, "s"),
        "another salt": request_of(cluster, "t"),
        "client": request_of(cluster, scope="s"),
        "salt of a client": request_of(cluster, "s", scope="s"),
        "adapter": request_of(cluster, adapter=ADAPTERS[0]),
        "another adapter": request_of(cluster, adapter=ADAPTERS[1]),
        "salt and adapter": request_of(cluster, "s", adapter=ADAPTERS[0]),
        "image": request_of(cluster, media=b"c" * 32),
        "another image": request_of(cluster, media=b"d" * 32),
        "salt and image": request_of(cluster, "s", media=b"c" * 32),
        "adapter and image": request_of(cluster, adapter=ADAPTERS[0], media=b"c" * 32),
    }


def hashes_of(request: GenerationRequest) -> bytes:
    assert isinstance(request.prompt, RenderedPrompts)
    [prompt] = request.prompt.prompts
    return prompt.prefix_hashes


@played(max_model_len=200)
async def test_requests_that_differ_in_salt_adapter_or_media_share_no_block(cluster: Cluster) -> None:
    seen: dict[bytes, str] = {}
    for name, request in variants(cluster).items():
        packed = hashes_of(request)
        blocks = [packed[:8], packed[8:]]
        assert all(len(block) == 8 and block not in seen for block in blocks), (name, seen.get(blocks[0]))
        seen |= dict.fromkeys(blocks, name)
    again = {hashes_of(request)[:8] for request in variants(cluster).values()}
    assert again <= seen.keys(), "equal requests share them"


@played(max_model_len=200)
async def test_workers_compute_the_hashes_by_which_the_proxy_routes(cluster: Cluster) -> None:
    for name, request in variants(cluster).items():
        cluster.pool.sent.clear()
        deltas = Generation(cluster.services, request, RequestRecord(name, "completion")).deltas()
        reading: asyncio.Future[Any] = asyncio.ensure_future(anext(deltas))
        await turn()
        [(_, start)], [(_, prepare)] = cluster.pool.of(StartPrefill), cluster.pool.of(PrepareDecode)
        prefill = PrefillPrompt.of(start, "pair", False, 0, 0.0).hash_blocks(BLOCK_SIZE, MODEL_ID)
        decode = DecodePrompt.of(prepare, 0, 0.0, BLOCK_SIZE, MODEL_ID).hashes
        assert pack_short_hashes(prefill) == pack_short_hashes(decode) == hashes_of(request), name
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await deltas.aclose()
