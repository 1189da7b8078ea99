"""Encoding of media before the chunks that need them, and media intake of a prefill worker; no model."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.engine.batch import Batch, ItemOutput
from tandem.engine.kv_cache.block_manager import BlockManager
from tandem.engine.vision.media_tensors import open_tensors
from tandem.engine.vision.prompt_media import EmbeddingCache, EncodeUnit, PromptMedia, placed
from tandem.handover.actions import SendToProxy
from tandem.prefill_worker.prefill_scheduler import PrefillScheduler
from tandem.protocol.messages.dispatch import AttemptFailed, FirstToken, StartPrefill
from tandem.protocol.messages.media import MediaItem, MediaTensor
from tandem.protocol.messages.media_cache import HEADER_BYTES
from tandem.protocol.messages.packed import pack_token_ids
from tandem.protocol.messages.sampling import SampledToken, SamplingParams, StopConditions
from tandem.runtime.errors import ErrorInfo, InvalidRequest, WorkerLost
from tandem.worker.media_intake import MediaIntake
from tandem.worker.worker_scheduler import WorkerScheduler

BUDGET = 32
NO_TENSORS: tuple[MediaTensor, ...] = ()


def an_item(spans: Sequence[tuple[int, int]], name: str = "a", kind: Any = "image") -> MediaItem:
    return MediaItem(name.encode().ljust(32), kind, tuple(spans), "/dev/shm/none", NO_TENSORS)


def media_of(
    items: Sequence[MediaItem], num_frames: Sequence[int] | None = None, cache: EmbeddingCache | None = None
) -> PromptMedia:
    num_tokens = max(item.spans[-1][0] + item.spans[-1][1] for item in items)
    frames = num_frames or [1] * len(items)
    tensors: list[dict[str, torch.Tensor]] = [{} for _ in items]
    media = PromptMedia(range(num_tokens), items, BUDGET // 2, cache or EmbeddingCache(1 << 20))
    media.set_tensors(tensors, frames)
    media.is_ready = True
    return media


def encode(media: PromptMedia, unit: EncodeUnit) -> None:
    """Returns rows that name their placeholder, in place of the vision tower."""
    item = media.items[unit.number]
    whole = media.partial.setdefault(unit.number, torch.full((1, item.num_tokens, 1), -1.0))
    whole[0, unit.offset : unit.offset + unit.num_tokens, 0] = torch.arange(unit.num_tokens) + unit.offset
    media.on_encoded(unit)


def a_request(media: Sequence[MediaItem], num_tokens: int, name: str = "t") -> StartPrefill:
    return StartPrefill(
        "proxy", [name], name, pack_token_ids(range(num_tokens)), SamplingParams(), [0], StopConditions(max_tokens=1),
        1e9, decode_worker_id=None, decode_epoch=None, media=tuple(media),
    )  # fmt: skip


def a_scheduler() -> PrefillScheduler:
    return WorkerScheduler(BlockManager(100, 8), "model", BUDGET, 8, 10.0).prefill


def run_step(batch: Batch) -> list[ItemOutput]:
    """Runs a step and checks that every computed placeholder has its embedding."""
    for task in batch.encodes:
        if not task.media.is_encoded(task.unit):
            encode(task.media, task.unit)
    for item in batch.items:
        if item.media is None:
            continue
        for number, medium in enumerate(item.media.items):
            for _, offset, num_tokens in placed(medium, item.start, item.start + len(item.token_ids)):
                embedding = item.media.find(number)
                if embedding is None:
                    embedding = item.media.partial[number]
                rows = embedding[0, offset : offset + num_tokens, 0]
                assert rows.tolist() == list(range(offset, offset + num_tokens))
    return [ItemOutput([SampledToken(7)] * len(item.samples)) for item in batch.items]


def cost_of(batch: Batch) -> int:
    return sum(len(item.token_ids) for item in batch.items) + sum(task.unit.num_tokens for task in batch.encodes)


@settings(max_examples=60, deadline=None)
@given(
    prompts=st.lists(
        st.lists(st.tuples(st.integers(0, 20), st.integers(1, 40), st.integers(1, 4)), max_size=4),
        min_size=1,
        max_size=4,
    ),
    digests=st.integers(1, 20),
)
def test_every_prompt_is_computed_within_the_budget(prompts: list[list[tuple[int, int, int]]], digests: int) -> None:
    """Draws for each prompt: words before an item, tokens per frame, number of frames."""
    cache = EmbeddingCache(10_000)
    scheduler = a_scheduler()
    count = 0
    for index, parts in enumerate(prompts):
        items, frames, end = [], [], 0
        for words, num_tokens, num_frames in parts:
            start = end + words
            count += 1
            # Equal digests mean equal media.
            name = f"{count % digests}-{num_tokens}-{num_frames}"
            items.append(an_item([(start, num_tokens * num_frames)], name, "video"))
            frames.append(num_frames)
            end = start + num_tokens * num_frames
        media = media_of(items, frames, cache) if items else None
        assert not scheduler.on_start(0.0, a_request(items, end + 3, f"t{index}"), None, None, media)
    finished = []
    for step in range(1000):
        batch, _ = scheduler.schedule(float(step))
        if not batch.items and not batch.encodes:
            break
        # A unit larger than a step gets its own step; other work uses the tokens that are left.
        largest = max((task.unit.num_tokens for task in batch.encodes), default=0)
        assert cost_of(batch) <= max(BUDGET, largest)
        for action in scheduler.on_step(float(step), run_step(batch)):
            assert isinstance(action, SendToProxy) and isinstance(action.message, FirstToken)
            finished.append(action.message.attempt_id)
    assert sorted(finished) == [f"t{index}" for index in range(len(prompts))]
    scheduler.blocks.check()
    assert not scheduler.prompts.num_running


def test_videos_are_encoded_in_several_steps_and_images_in_one() -> None:
    media = media_of([an_item([(2, 6), (10, 6), (18, 6)], "v", "video"), an_item([(30, 40)], "i")], [3, 1])
    end, units, cost = media.afford(0, 31, BUDGET)
    # Two frames of six tokens are 12, three would be more than the 16 of a unit.
    assert [(u.start, u.end, u.first_frame, u.num_frames, u.num_tokens) for u in units] == [(2, 16, 0, 2, 12)]
    assert (end, cost) == (18, 12)  # the next frame would cost 6 more than there is after 18 tokens and 12
    for unit in units:
        encode(media, unit)
    end, units, _ = media.afford(18, 31, BUDGET)
    assert [(u.first_frame, u.num_frames) for u in units] == [(2, 1)] and end == 30
    encode(media, units[0])
    assert media.afford(30, 62, BUDGET) == (30, [], 0)
    end, units, cost = media.afford(30, 62, BUDGET, may_exceed=True)
    assert [u.num_tokens for u in units] == [40] and end == 30 and cost == 40


def test_cached_placeholders_are_not_encoded() -> None:
    media = media_of([an_item([(2, 6)], "a"), an_item([(10, 6)], "b")])
    _, units, _ = media.afford(8, 20, BUDGET)
    assert [u.number for u in units] == [1]


def test_an_image_of_two_prompts_is_encoded_once() -> None:
    cache = EmbeddingCache(1 << 20)
    scheduler = a_scheduler()
    for name in ("t0", "t1"):
        item = an_item([(3 if name == "t0" else 4, 10)])
        assert not scheduler.on_start(0.0, a_request([item], 20, name), None, None, media_of([item], None, cache))
    while (batch := scheduler.schedule(1.0)[0]).items or batch.encodes:
        scheduler.on_step(1.0, run_step(batch))
    assert cache.num_encoded == 1
    assert list(cache.take_encoded()) == [b"a".ljust(32)] and not cache.take_encoded()


def test_failed_media_fail_only_their_prompt() -> None:
    scheduler = a_scheduler()
    item = an_item([(0, 40)])
    media = media_of([item])
    assert not scheduler.on_start(0.0, a_request([item], 42, "bad"), None, None, media)
    assert not scheduler.on_start(0.0, a_request([], 20, "good"), None)
    batch, _ = scheduler.schedule(1.0)
    assert batch.encodes and not [i for i in batch.items if i.media is not None], (
        "the image leaves no tokens for a chunk"
    )
    media.error = ErrorInfo.of(InvalidRequest("media item 0: not a picture"))
    (action,) = scheduler.on_step(2.0, [ItemOutput([SampledToken(7)] * len(i.samples)) for i in batch.items])
    assert isinstance(action, SendToProxy) and isinstance(action.message, AttemptFailed)
    assert action.message.attempt_id == "bad" and "not a picture" in action.message.error.message
    batch, _ = scheduler.schedule(3.0)
    (action,) = scheduler.on_step(4.0, run_step(batch))
    assert isinstance(action, SendToProxy) and isinstance(action.message, FirstToken)
    scheduler.blocks.check()


def test_missing_media_fail_a_prompt_before_it_starts() -> None:
    scheduler = a_scheduler()
    item = an_item([(1, 4)])
    media = PromptMedia(range(9), [item], BUDGET // 2, EmbeddingCache(1 << 20))
    scheduler.on_start(0.0, a_request([item], 9), None, None, media)
    assert scheduler.schedule(0.0) == (Batch([], encodes=[]), []), "the prompt waits for its embeddings"
    media.error, media.is_ready = ErrorInfo.of(WorkerLost("the media cache did not send it")), True
    batch, [action] = scheduler.schedule(0.0)
    assert not batch.items and isinstance(action, SendToProxy) and isinstance(action.message, AttemptFailed)
    assert action.message.error.code == "worker_lost", "the proxy dispatches it again"
    assert scheduler.prompts.is_idle and scheduler.schedule(0.0) == (Batch([], encodes=[]), [])


def test_a_prompt_may_end_while_its_media_are_encoded() -> None:
    scheduler = a_scheduler()
    item = an_item([(0, 40)])
    assert not scheduler.on_start(0.0, a_request([item], 42, "gone"), None, None, media_of([item]))
    batch, _ = scheduler.schedule(1.0)
    assert batch.encodes and not batch.items
    scheduler.on_abort("proxy", "gone")
    assert scheduler.on_step(2.0, run_step(batch)) == []
    assert scheduler.blocks.num_free == 100 and not scheduler.prompts.num_running


# ---- the worker's own cache


def test_the_embedding_cache_evicts_the_least_recently_used() -> None:
    cache = EmbeddingCache(100)
    cache.put({bytes([i]): torch.zeros(10) for i in range(2)})
    assert cache.get(b"\0") is not None
    cache.put({b"\2": torch.zeros(10)})
    assert [cache.get(bytes([i])) is not None for i in range(3)] == [True, False, True]
    assert cache.num_bytes == 80
    cache.put({b"large": torch.zeros(26)})
    assert cache.get(b"large") is None and cache.num_bytes == 80


def test_an_embedding_of_another_length_is_not_used() -> None:
    cache = EmbeddingCache(1 << 20)
    item = an_item([(0, 4)])
    cache.put({item.digest: torch.zeros(1, 5, 1)})
    assert media_of([item], None, cache).find(0) is None


# ---- opening segments


def stored(*tensors: tuple[str, torch.Tensor], **changes: Any) -> MediaItem:
    fd = os.memfd_create("tandem-test-media", os.MFD_CLOEXEC)
    offset, descriptions = HEADER_BYTES, []
    os.pwrite(fd, b"d" * 32, 0)
    for name, tensor in tensors:
        data = bytes(tensor.contiguous().flatten().view(torch.uint8).tolist())
        os.pwrite(fd, data, offset)
        dtype = str(tensor.dtype).removeprefix("torch.")
        descriptions.append(MediaTensor(name, dtype, tuple(tensor.shape), offset, len(data)))
        offset += len(data)
    item = MediaItem(b"d" * 32, "image", ((1, 4),), f"/proc/{os.getpid()}/fd/{fd}", tuple(descriptions))
    return msgspec.structs.replace(item, **changes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int64])
def test_tensors_survive_shared_memory(dtype: torch.dtype) -> None:
    values = torch.arange(24).reshape(2, 3, 4).to(dtype)
    opened = open_tensors(stored(("image_grid_thw", torch.tensor([[1, 4, 4]])), ("pixel_values", values)))
    assert opened["pixel_values"].dtype == dtype and torch.equal(opened["pixel_values"], values)
    assert opened["image_grid_thw"].tolist() == [[1, 4, 4]]


def test_tensors_outlive_their_segment() -> None:
    item = stored(("pixel_values", torch.arange(4.0)))
    opened = open_tensors(item)
    os.close(int(item.segment.rsplit("/", 1)[1]))
    assert opened["pixel_values"].tolist() == [0, 1, 2, 3]


def test_invalid_segments_are_refused() -> None:
    good = stored(("pixel_values", torch.arange(4.0)))
    with pytest.raises(InvalidRequest, match="cannot be opened: ENAMETOOLONG"):
        open_tensors(msgspec.structs.replace(good, segment=f"/dev/shm/{'x' * 300}"))
    with pytest.raises(WorkerLost, match="the media cache process has exited"):
        open_tensors(msgspec.structs.replace(good, segment="/dev/shm/tandem-no-such-segment"))
    larger = msgspec.structs.replace(good.tensors[0], shape=(5,), num_bytes=20)
    with pytest.raises(InvalidRequest, match="ends at byte 84 of a segment of 80 bytes"):
        open_tensors(msgspec.structs.replace(good, tensors=(larger,)))
    read_end, write_end = os.pipe()
    try:
        with pytest.raises(InvalidRequest, match="not shared memory"):
            open_tensors(msgspec.structs.replace(good, segment=f"/proc/{os.getpid()}/fd/{read_end}"))
    finally:
        os.close(read_end)
        os.close(write_end)


def test_a_reused_descriptor_is_detected() -> None:
    other = msgspec.structs.replace(stored(("pixel_values", torch.arange(4.0))), digest=b"e" * 32)
    with pytest.raises(WorkerLost, match="has evicted an image or video"):
        open_tensors(other)


# ---- the intake


class AnyTower:
    """Accepts any item as one frame."""

    def check(self, item: MediaItem, tensors: Mapping[str, torch.Tensor]) -> None: ...

    def num_frames(self, kind: str, tensors: Mapping[str, torch.Tensor]) -> int:
        return 1


class Shared:
    """SharedEmbeddings of a dict. answer: set when `get` may answer."""

    def __init__(self) -> None:
        self.embeddings: dict[bytes, torch.Tensor] = {}
        self.asked: list[bytes] = []
        self.answer = asyncio.Event()
        self.broken = False

    async def get(self, digests: Sequence[bytes]) -> dict[bytes, torch.Tensor]:
        self.asked += digests
        await self.answer.wait()
        if self.broken:
            raise ConnectionError("gone")
        return {digest: self.embeddings[digest] for digest in digests if digest in self.embeddings}

    def set(self, embeddings: Mapping[bytes, torch.Tensor]) -> None:
        self.embeddings.update(embeddings)


def test_a_text_model_refuses_media() -> None:
    intake = MediaIntake(None, EmbeddingCache(0), 16, None, lambda: None)
    assert intake.open(a_request([], 9)) is None
    with pytest.raises(InvalidRequest, match="takes no images or video"):
        intake.open(a_request([an_item([(1, 4)])], 9))


async def test_embeddings_of_another_worker_are_reused() -> None:
    shared, done = Shared(), asyncio.Event()
    embeddings: Any = shared
    item = stored()
    shared.embeddings[item.digest] = torch.zeros(1, 4, 1)
    tower: Any = AnyTower()
    intake = MediaIntake(tower, EmbeddingCache(1 << 20), 16, embeddings, done.set)
    scheduler = a_scheduler()
    request = a_request([item, msgspec.structs.replace(item, spans=((5, 4),))], 9)
    media = intake.open(request)
    assert media is not None
    scheduler.on_start(0.0, request, None, None, media)
    assert not scheduler.schedule(0.0)[0].items, "the prompt waits for the answer"
    shared.answer.set()
    await asyncio.wait_for(done.wait(), 10)
    batch, _ = scheduler.schedule(0.0)
    assert [len(i.token_ids) for i in batch.items] == [9] and not batch.encodes
    assert shared.asked == [item.digest], "one item, asked for once"
    assert intake.open(a_request([item], 9, "again")) is not None
    assert shared.asked == [item.digest], "the worker's own cache has it now"


async def test_a_failing_shared_cache_fails_no_request() -> None:
    shared, done = Shared(), asyncio.Event()
    embeddings: Any = shared
    shared.broken = True
    shared.answer.set()
    tower: Any = AnyTower()
    cache = EmbeddingCache(1 << 20)
    intake = MediaIntake(tower, cache, 16, embeddings, done.set)
    media = intake.open(a_request([stored()], 9))
    assert media is not None and not media.is_ready
    await asyncio.wait_for(done.wait(), 10)
    assert media.is_ready
    _, units, _ = media.afford(0, 9, BUDGET)
    for unit in units:
        encode(media, unit)
    intake.share_encoded()
    assert list(shared.embeddings) == [b"d" * 32], "the embedding is shared"
