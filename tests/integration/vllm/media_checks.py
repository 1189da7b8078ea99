"""Gives vLLM's engine images and videos as a worker does, and writes what happened: `media_checks.py MODEL FILE`.

Runs in vLLM's interpreter. MODEL is of the family qwen3_vl; `test_media.py` says what must be in the file.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch

sys.path.insert(0, str(Path(__file__).parents[3]))
sys.path.insert(0, str(Path(__file__).parent))

from engine_driver import BLOCK_SIZE, EngineDriver  # type: ignore[import-not-found]

from tandem.protocol.messages.dispatch import StartPrefill
from tandem.protocol.messages.media import MediaItem
from tandem.protocol.messages.packed import pack_token_ids
from tandem.protocol.messages.sampling import SamplingParams, StopConditions
from tandem.protocol.prefix_hash import BlockHasher
from tandem.runtime.errors import InvalidRequest, TandemError, WorkerLost
from tandem.vllm_worker.engine.vllm_media import VllmMedia
from tandem.vllm_worker.scheduler.engine_orders import AddRequest
from tests.support.vision_models import IMAGE, VIDEO, VISION_START, Medium, make_item, make_medium

NUM_TOKENS = 12
WORDS = list(range(20, 60))
VISION_END = VISION_START + 3


class LateMedia:
    """Stands for `RemoteMedia`: tensors come when `arrive` is called, or its error."""

    num_fetched_bytes = 0

    def __init__(self) -> None:
        self._waiting: asyncio.Queue[asyncio.Future[dict[str, torch.Tensor]]] = asyncio.Queue()
        self.num_released = 0

    async def fetch(
        self, endpoint: str, item: MediaItem, names: list[str], on_release: Callable[[Any], object], client: str
    ) -> dict[str, torch.Tensor]:
        on_release(self._release)
        assert endpoint
        assert names == [tensor.name for tensor in item.tensors]
        arrived: asyncio.Future[dict[str, torch.Tensor]] = asyncio.get_running_loop().create_future()
        self._waiting.put_nowait(arrived)
        return await arrived

    def _release(self) -> None:
        self.num_released += 1

    async def arrive(self, tensors: dict[str, torch.Tensor] | TandemError) -> None:
        arrived = await self._waiting.get()
        if isinstance(tensors, TandemError):
            arrived.set_exception(tensors)
        else:
            arrived.set_result(tensors)
        await asyncio.sleep(0.01)

    def close(self) -> None:
        pass


def prompt_of(medium: Medium) -> tuple[list[int], MediaItem]:
    """Returns words, the item between vision tokens, and words."""
    token_ids, spans = list(WORDS), []
    for num_tokens in medium.num_tokens:
        token_ids.append(VISION_START)
        spans.append((len(token_ids), num_tokens))
        token_ids += [IMAGE if medium.kind == "image" else VIDEO] * num_tokens + [VISION_END]
    return token_ids + WORDS[::-1], make_item(medium, spans)


class Checks:
    def __init__(self, driver: EngineDriver) -> None:
        self.driver = driver
        self.engine = driver.engine
        self.remote = LateMedia()
        remote: Any = self.remote
        self.media = VllmMedia(self.engine.vllm_config, self.engine.facts.max_item_tokens, remote, self._add)
        self.num_added = 0

    def _add(self, order: AddRequest) -> None:
        self.num_added += 1
        self.engine.add(order, self._hashes(order.token_ids, order.message.media))

    @staticmethod
    def _hashes(token_ids: list[int], items: tuple[MediaItem, ...]) -> list[bytes]:
        return BlockHasher(BLOCK_SIZE, "model", "", items).prompt_hashes(pack_token_ids(token_ids))

    def order(self, token_ids: list[int], *items: MediaItem, cache: str = "") -> AddRequest:
        """Raises as the worker refuses the prompt."""
        engine_id = self.driver.new_id()
        message = StartPrefill(
            proxy_id="p",
            attempt_ids=[engine_id],
            transfer_id=engine_id,
            token_ids=pack_token_ids(token_ids),
            sampling=SamplingParams(temperature=0.0),
            seeds=[0],
            stop=StopConditions(max_tokens=NUM_TOKENS),
            deadline_s=600.0,
            media=items,
            media_cache=cache,
            decode_worker_id=None,
            decode_epoch=None,
        )
        media = self.media.open(message)
        return AddRequest(engine_id, message, 0, token_ids, 0, NUM_TOKENS, media=media)

    def run(self, token_ids: list[int], *items: MediaItem) -> list[int]:
        order = self.order(token_ids, *items)
        self.media.add(order)
        return self.driver.result(order.engine_id)

    def refusal(self, token_ids: list[int], *items: MediaItem) -> str:
        try:
            self.order(token_ids, *items)
        except InvalidRequest as error:
            return str(error)
        return ""

    # ---- checks

    def prefixes(self) -> dict[str, Any]:
        """Two images of one size: the blocks of their prompts have other names, and those are the proxies'."""
        found: dict[str, Any] = {}
        for name, seed in (("one", 1), ("other", 2)):
            token_ids, item = prompt_of(make_medium("qwen3_vl", "image", 4, 5, 1, seed))
            known = set(self.driver.added)
            self.driver.added.clear()
            generated = self.run(token_ids, item)
            expected = self._hashes((token_ids + generated)[:-1], (item,))
            self.driver.wait(lambda new=set(expected) - known: new <= set(self.driver.added))
            found[name] = {
                "tokens": generated,
                "expected": [each.hex() for each in expected],
                "added": [each.hex() for each in self.driver.added],
            }
        return found

    def refusals(self) -> dict[str, str]:
        image = make_medium("qwen3_vl", "image", 4, 5, 1, 3)
        video = make_medium("qwen3_vl", "video", 2, 2, 3, 3)
        token_ids, item = prompt_of(image)
        video_ids, video_item = prompt_of(video)
        grid, pixels = item.tensors[1], item.tensors[0]
        start, length = item.spans[0]
        larger = self.engine.facts.max_item_tokens + 2
        large_ids, large = prompt_of(make_medium("qwen3_vl", "image", 2, -(-larger // 2), 1, 4))
        split = msgspec.structs.replace(item, spans=((start, 8), (start + 8, length - 8)))
        bare_ids = [WORDS[0] if each == VISION_END else each for each in video_ids]
        return {
            "no grid": self.refusal(token_ids, msgspec.structs.replace(item, tensors=(pixels,))),
            "no pixels": self.refusal(token_ids, msgspec.structs.replace(item, tensors=(grid,))),
            "misfit": self.refusal(token_ids, msgspec.structs.replace(item, spans=((start, length - 1),))),
            "split": self.refusal(token_ids, split),
            "outside": self.refusal(token_ids[: start + 3], item),
            "too long": self.refusal(large_ids, large),
            "no vision tokens": self.refusal(bare_ids, video_item),
            "another model's": self.refusal(token_ids, self._of_other_size(item)),
            "fits": self.refusal(video_ids, video_item) + self.refusal(token_ids, item),
        }

    @staticmethod
    def _of_other_size(item: MediaItem) -> MediaItem:
        """The same item, with pixels of patches of half the size."""
        pixels, grid = item.tensors
        rows, columns = pixels.shape
        half = msgspec.structs.replace(pixels, shape=(rows, columns // 2), num_bytes=pixels.num_bytes // 2)
        return msgspec.structs.replace(item, tensors=(half, grid))

    async def late(self) -> dict[str, Any]:
        """Media of another host: the order waits for them, unless it is aborted."""
        medium = make_medium("qwen3_vl", "image", 4, 5, 1, 5)
        token_ids, item = prompt_of(medium)
        expected = self.run(token_ids, item)
        self.engine.clear_cache()
        num_added = self.num_added
        order = self.order(token_ids, item, cache="tcp://127.0.0.1:1")
        self.media.add(order)
        await asyncio.sleep(0.05)
        waited = self.num_added == num_added
        await self.remote.arrive(medium.tensors)
        tokens = self.driver.result(order.engine_id)
        aborted = self.order(token_ids, item, cache="tcp://127.0.0.1:1")
        self.media.add(aborted)
        self.media.forget([aborted.engine_id])
        await self.remote.arrive(medium.tensors)
        failing = self.order(token_ids, item, cache="tcp://127.0.0.1:1")
        self.media.add(failing)
        await self.remote.arrive(WorkerLost("the media cache did not send it"))
        self.driver.result(failing.engine_id)
        wrong = self.order(token_ids, item, cache="tcp://127.0.0.1:1")
        self.media.add(wrong)
        await self.remote.arrive({"pixel_values": medium.tensors["pixel_values"]})
        self.driver.result(wrong.engine_id)
        for each in (order, aborted, failing, wrong):
            assert each.media is not None
            each.media.release_if_unused()
        return {
            "expected": expected,
            "waited": waited,
            "tokens": tokens,
            "num_added": self.num_added - num_added,
            "failed": self.driver.endings[failing.engine_id],
            "wrong": self.driver.endings[wrong.engine_id],
            "num_released": self.remote.num_released,
            "all_free": self.driver.all_free(),
        }


async def check(driver: EngineDriver) -> dict[str, Any]:
    checks = Checks(driver)
    return {"prefixes": checks.prefixes(), "refusals": checks.refusals(), "late": await checks.late()}


def main() -> None:
    driver = EngineDriver(sys.argv[1])
    Path(sys.argv[2]).write_text(json.dumps(asyncio.run(check(driver))))
    driver.engine.stop(5.0)
    os._exit(0)


main()
