"""Images and video through real prefill and decode workers, sent by a fake proxy beside text requests over HTTP."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from tandem.protocol.codec import Codec
from tandem.protocol.messages.dispatch import (
    AbortAttempt,
    AttemptFailed,
    FirstToken,
    PrepareDecode,
    StartPrefill,
    TokenBatch,
    ToProxy,
)
from tandem.protocol.messages.media import MediaItem
from tandem.protocol.messages.membership import WorkerInfo
from tandem.protocol.messages.packed import pack_token_ids
from tandem.protocol.messages.sampling import SamplingParams, StopConditions
from tandem.protocol.sockets import DealerSocket, new_context
from tests.support.cluster import Cluster
from tests.support.vision_models import VisionPrompt, make_medium, make_model, reference

FAMILY = "qwen2_5_vl"
PROXY = "fake-proxy"
NUM_NEW = 12
TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def folder(noise_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A vision model that uses the first 320 tokens of the noise model's tokeniser."""
    path = tmp_path_factory.mktemp("vision")
    make_model(FAMILY, path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(noise_model / name, path / name)
    return path


@pytest.fixture(scope="module")
def cluster(folder: Path) -> Iterator[Cluster]:
    arguments = ["--model", str(folder), "--dtype", "float32", "--max-num-batched-tokens", "48", "--block-size", "16"]
    with Cluster(*arguments, "--kv-cache-gib", "0.02", "--threads-per-worker", "1") as running:
        yield running


class FakeProxy:
    def __init__(self, prefill: WorkerInfo, decode: WorkerInfo) -> None:
        self._context = new_context()
        self._workers = prefill, decode
        self._arrived: asyncio.Queue[Any] = asyncio.Queue()
        self._sockets = [
            DealerSocket[ToProxy](
                self._context, w.endpoint, Codec(ToProxy), self._arrived.put_nowait, f"{PROXY}:0".encode()
            )
            for w in (prefill, decode)
        ]
        self.tokens: dict[str, list[int]] = {}
        self.num_cached_tokens: dict[str, int] = {}
        self.errors: dict[str, str] = {}

    def send(self, name: str, token_ids: list[int], media: tuple[MediaItem, ...]) -> None:
        prefill, decode = self._workers
        self.tokens[name] = []
        common = (SamplingParams(temperature=0.0), [0], StopConditions(NUM_NEW, frozenset()))
        packed = pack_token_ids(token_ids)
        self._sockets[1].send(
            PrepareDecode(
                PROXY,
                [name],
                name,
                packed,
                *common,
                60.0,
                prefill_worker_id=prefill.worker_id,
                prefill_epoch=prefill.epoch,
                media=media,
            )
        )
        self._sockets[0].send(
            StartPrefill(
                PROXY,
                [name],
                name,
                packed,
                *common,
                60.0,
                decode_worker_id=decode.worker_id,
                decode_epoch=decode.epoch,
                media=media,
            )
        )

    async def finish(self) -> None:
        """Receives until every request has all its tokens or an error."""
        first: dict[str, int] = {}
        rest: dict[str, list[int]] = {name: [] for name in self.tokens}
        while any(
            name not in self.errors and (name not in first or 1 + len(rest[name]) < NUM_NEW) for name in self.tokens
        ):  # the first token comes from the prefill worker, maybe after those of decode
            message = await asyncio.wait_for(self._arrived.get(), TIMEOUT_S)
            match message:
                case FirstToken():
                    first[message.attempt_id] = message.token.token_id
                    self.num_cached_tokens[message.attempt_id] = message.num_cached_tokens
                case TokenBatch():
                    for new in message.tokens:
                        rest[new.attempt_id].append(new.token.token_id)
                case AttemptFailed():
                    self.errors.setdefault(message.attempt_id, message.error.message)
                    for worker in self._sockets:  # as a proxy does: the other worker still holds the request
                        worker.send(AbortAttempt(PROXY, message.attempt_id))
        self.tokens = {name: [first[name], *rest[name]] for name in self.tokens if name not in self.errors}

    def close(self) -> None:
        for socket in self._sockets:
            socket.close()
        self._context.term()


def generate(cluster: Cluster, prompts: dict[str, tuple[list[int], tuple[MediaItem, ...]]]) -> FakeProxy:
    return asyncio.run(_generate(cluster.worker("prefill-0").worker, cluster.worker("decode-0").worker, prompts))


async def _generate(
    prefill: WorkerInfo, decode: WorkerInfo, prompts: dict[str, tuple[list[int], tuple[MediaItem, ...]]]
) -> FakeProxy:
    proxy = FakeProxy(prefill, decode)
    try:
        for name, (token_ids, media) in prompts.items():
            proxy.send(name, token_ids, media)
        await proxy.finish()
    finally:
        proxy.close()
    return proxy


@pytest.mark.timeout(600)
def test_images_and_video_match_transformers(folder: Path, cluster: Cluster) -> None:
    image = make_medium(FAMILY, "image", 8, 9, frames=1, seed=1)
    video = make_medium(FAMILY, "video", 3, 4, frames=5, seed=3)
    prompts = {
        "text": VisionPrompt.of([70], 1),
        "image": VisionPrompt.of([20, image, 9], 2),
        "video": VisionPrompt.of([3, video, 17], 3),
        "mixed": VisionPrompt.of([5, video, 4, image, 2, image, 30], 4),
    }
    expected = dict(zip(prompts, [ids for ids, _ in reference(folder, list(prompts.values()), NUM_NEW)], strict=True))
    sent = {name: (prompt.token_ids, prompt.items()) for name, prompt in prompts.items()}
    token_ids, (item,) = sent["image"]
    cut = msgspec.structs.replace(item, segment="/dev/shm/tandem-gone")
    answers = generate(cluster, sent | {"cut": (token_ids, (cut,))})
    assert answers.tokens == expected
    assert answers.errors.keys() == {"cut"} and "the media cache process" in answers.errors["cut"]
    again = generate(cluster, {f"{name} again": prompt for name, prompt in sent.items()})
    assert again.tokens == {f"{name} again": token_ids for name, token_ids in expected.items()}
    assert all(num >= 64 for num in again.num_cached_tokens.values())
    # The same workers serve text requests over HTTP.
    served = httpx.get(f"{cluster.url}/v1/models", timeout=TIMEOUT_S).json()["data"][0]["id"]
    body = {
        "model": served, "prompt": prompts["text"].token_ids, "max_tokens": NUM_NEW, "temperature": 0,
        "ignore_eos": True, "return_token_ids": True,
    }  # fmt: skip
    answer = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=TIMEOUT_S)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["token_ids"] == expected["text"]
    cluster.wait_for(cluster.all_blocks_free)
    assert "Traceback" not in cluster.logs()
