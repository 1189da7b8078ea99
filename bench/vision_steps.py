"""How long a prefill worker's steps are, and how long text waits, while others send images or video.

    python -m bench.vision_steps --model DIR [--num-prompts 40]

DIR: a Qwen2-VL, Qwen2.5-VL or Qwen3-VL. One scheduler and one engine in this process, on one thread. A text prompt of
128 tokens arrives after every step; beside it, by turns: nothing, text of as many tokens as the image has, an image of
644x364 pixels, a video of 16 frames of that size, and (for comparison) the same video encoded in one piece.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from typing import Any

import torch

from tandem.engine.block_manager import BlockManager
from tandem.engine.config import EngineConfig
from tandem.engine.kv_pool import KVPool
from tandem.engine.loading.model_loader import load_model
from tandem.engine.model_runner import ModelRunner
from tandem.engine.vision.embedding_cache import EmbeddingCache
from tandem.prefill_worker.media import MediaIntake
from tandem.prefill_worker.scheduler import PrefillScheduler
from tandem.protocol.messages.dispatch import FirstToken, StartPrefill
from tandem.protocol.messages.generation import SamplingParams, StopConditions
from tandem.protocol.messages.media import DIGEST_BYTES, SEGMENT_HEADER_BYTES, MediaItem, MediaKind, MediaTensor
from tandem.protocol.messages.token_ids import pack_token_ids
from tandem.worker.actions import SendToProxy

NUM_TEXT_TOKENS = 128
BUDGET = 512
BLOCK_SIZE = 64
WHOLE = 1 << 30
GRID = (26, 46)  # patches of an image of 364x644 pixels


def make_item(kind: MediaKind, frames: int, vision_config: Any, rng: random.Random, start: int) -> MediaItem:
    """Of random patches, which cost what a picture's do. start: its first placeholder in the prompt."""
    names = ("pixel_values", "image_grid_thw") if kind == "image" else ("pixel_values_videos", "video_grid_thw")
    grid = torch.tensor([[frames, *GRID]])
    values = 3 * vision_config.temporal_patch_size * vision_config.patch_size**2
    fd = os.memfd_create("tandem-bench-media", os.MFD_CLOEXEC)
    digest = rng.randbytes(DIGEST_BYTES)
    os.pwrite(fd, digest, 0)
    tensors, offset = [], SEGMENT_HEADER_BYTES
    for name, tensor in zip(names, (torch.randn(int(grid.prod()), values), grid), strict=True):
        os.pwrite(fd, tensor.numpy().tobytes(), offset)
        dtype = str(tensor.dtype).removeprefix("torch.")
        tensors.append(MediaTensor(name, dtype, tuple(tensor.shape), offset, tensor.nbytes))
        offset += -(-tensor.nbytes // 64) * 64
    os.ftruncate(fd, offset)
    frame_tokens = GRID[0] * GRID[1] // vision_config.spatial_merge_size**2
    spans: tuple[tuple[int, int], ...] = ((start, frames * frame_tokens),)
    if kind == "video" and vision_config.model_type.startswith("qwen3"):  # a time before each frame
        spans = tuple((start + frame * (frame_tokens + 1), frame_tokens) for frame in range(frames))
    return MediaItem(digest, kind, spans, f"/proc/{os.getpid()}/fd/{fd}", tuple(tensors))


def words(number: int, rng: random.Random) -> list[int]:
    return [rng.randrange(4, 300) for _ in range(number)]


def prompt_beside(kind: str, vision_config: Any, rng: random.Random) -> tuple[list[int], tuple[MediaItem, ...]]:
    if kind == "text":
        return words(GRID[0] * GRID[1] // vision_config.spatial_merge_size**2, rng), ()
    if kind == "image":
        item = make_item("image", 1, vision_config, rng, 5)
    else:
        item = make_item("video", 8, vision_config, rng, 5)  # of two frames each
    return words(item.spans[-1][0] + item.spans[-1][1] + 5, rng), (item,)


def measure(kind: str, config: EngineConfig, num_prompts: int) -> str:
    loaded = load_model(config)
    assert loaded.vision is not None, "give a model that takes images"
    pool = KVPool(loaded, config)
    runner = ModelRunner(loaded, pool)
    scheduler = PrefillScheduler(BlockManager(pool.num_blocks, BLOCK_SIZE), "model", BUDGET, 64, 10.0)
    unit_tokens = WHOLE if kind == "video in one piece" else BUDGET // 2
    intake = MediaIntake(loaded.vision, EmbeddingCache(0), unit_tokens, None, lambda: None)
    rng = random.Random(0)
    stop = StopConditions(1, frozenset())
    sent: dict[str, float] = {}
    steps: list[float] = []
    waits: list[float] = []
    beside_waits: list[float] = []

    def send(name: str, token_ids: list[int], media: tuple[MediaItem, ...]) -> None:
        packed = pack_token_ids(token_ids)
        request = StartPrefill(
            "proxy", [name], name, packed, SamplingParams(temperature=0.0), [0], stop, None, None, 1e9, media=media
        )
        sent[name] = time.perf_counter()
        scheduler.on_start(sent[name], request, None, None, intake.open(request))
        for item in media:
            os.close(int(item.segment.rsplit("/", 1)[1]))

    num_sent = 0
    while num_sent < num_prompts or scheduler.num_running or scheduler.num_waiting:
        if num_sent < num_prompts:
            if kind != "nothing" and not any(name.startswith("beside") for name in sent):
                send(f"beside-{num_sent}", *prompt_beside(kind, loaded.vision.config, rng))
            send(f"text-{num_sent}", words(NUM_TEXT_TOKENS, rng), ())
            num_sent += 1
        batch, _ = scheduler.schedule(time.perf_counter())
        started = time.perf_counter()
        outputs = runner.run(batch)
        now = time.perf_counter()
        steps.append(now - started)
        for action in scheduler.on_step(now, outputs):
            assert isinstance(action, SendToProxy) and isinstance(action.message, FirstToken), action
            name = action.message.attempt_id
            (waits if name.startswith("text") else beside_waits).append(now - sent.pop(name))
    pool.close()
    steps_ms, waits_ms = [sorted(1e3 * s for s in times) for times in (steps, waits)]
    return (
        f"| {kind} | {statistics.median(steps_ms):.1f} | {steps_ms[-1]:.1f} | {statistics.median(waits_ms):.1f} "
        f"| {waits_ms[int(0.95 * len(waits_ms))]:.1f} | {waits_ms[-1]:.1f} | {len(beside_waits)} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--num-prompts", type=int, default=40)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    config = EngineConfig(
        arguments.model, device="cpu", block_size=BLOCK_SIZE, kv_cache_bytes=1 << 28, max_model_len=4096
    )
    print("| beside text prompts | step p50 ms | max | first token of text p50 ms | p95 | max | others finished |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for kind in ("nothing", "text", "image", "video", "video in one piece"):
        print(measure(kind, config, arguments.num_prompts), flush=True)


if __name__ == "__main__":
    main()
