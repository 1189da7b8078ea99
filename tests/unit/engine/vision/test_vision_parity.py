"""Models with images and video equal transformers' `generate` in float32, through prefill and decode."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.runtime.errors import InvalidRequest
from tests.support.vision_models import MODELS, Generated, Medium, VisionPrompt, make_medium, make_model, reference
from tests.support.vision_pair import BLOCK_SIZE, VisionPair

NUM_NEW = 28


def prompts_of(family: str) -> dict[str, VisionPrompt]:
    """An image, a video, both, and text alone. The larger image does not fit a step of 48 tokens at all."""
    large = make_medium(family, "image", *((32, 32) if family == "llava_onevision" else (8, 9)), frames=1, seed=1)
    small = make_medium(family, "image", *((16, 32) if family == "llava_onevision" else (3, 2)), frames=1, seed=2)
    video = make_medium(family, "video", 3, 4, frames=5, seed=3)
    return {
        "text": VisionPrompt.of([70], 1),
        "image": VisionPrompt.of([20, large, 9], 2),
        "video": VisionPrompt.of([3, video, 17], 3),
        "mixed": VisionPrompt.of([5, small, 4, video, 2, large, small, 30], 4),
        "no words first": VisionPrompt.of([small, 1], 5),
    }


@pytest.fixture(scope="module", params=MODELS)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(family)
    make_model(family, path)
    return path


@pytest.fixture(scope="module")
def expected(family: str, folder: Path) -> dict[str, Generated]:
    prompts = prompts_of(family)
    return dict(zip(prompts, reference(folder, list(prompts.values()), NUM_NEW), strict=True))


@pytest.fixture(scope="module")
def pair(folder: Path) -> Iterator[VisionPair]:
    pair = VisionPair(folder)
    yield pair
    pair.close()


def assert_as_expected(got: Generated, expected: Generated) -> None:
    assert got[0] == expected[0]
    assert got[1] == pytest.approx(expected[1], abs=1e-3)


def test_one_batch_then_again_from_the_prefix_cache(
    family: str, pair: VisionPair, expected: dict[str, Generated]
) -> None:
    prompts = prompts_of(family)
    numbers = {name: pair.start(p.token_ids, p.items(), NUM_NEW) for name, p in prompts.items()}
    pair.run()
    for name, number in numbers.items():
        assert_as_expected(pair.generated(number), expected[name])
    assert any(0 < len(item.token_ids) < 40 and item.media is not None for b in pair.batches for item in b.items)
    num_encoded = pair.cache.num_encoded
    again = {name: pair.start(p.token_ids, p.items(), NUM_NEW) for name, p in prompts.items()}
    pair.run()
    for name, number in again.items():
        assert_as_expected(pair.generated(number), expected[name])
        assert pair.num_cached_tokens[number] >= (len(prompts[name].token_ids) - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert pair.cache.num_encoded == num_encoded == 3  # each medium is encoded once for all prompts


def test_different_images_do_not_share_cached_blocks(family: str, folder: Path, pair: VisionPair) -> None:
    size = (16, 16) if family == "llava_onevision" else (4, 4)
    words = [11, 10]
    pictures = [make_medium(family, "image", *size, frames=1, seed=seed) for seed in (21, 22)]
    prompts = [VisionPrompt.of([words[0], picture, words[1]], 6) for picture in pictures]
    assert prompts[0].token_ids == prompts[1].token_ids
    numbers = []
    for prompt in prompts:
        numbers.append(pair.start(prompt.token_ids, prompt.items(), NUM_NEW))
        pair.run()
    for number, wanted in zip(numbers, reference(folder, prompts, NUM_NEW), strict=True):
        assert_as_expected(pair.generated(number), wanted)
    assert pair.num_cached_tokens[numbers[1]] == 8  # the words before it


def test_preempted_sequences_keep_their_positions(family: str, folder: Path, expected: dict[str, Generated]) -> None:
    prompts = prompts_of(family)
    names = ["image", "video", "mixed"]
    needed = [-(-(len(prompts[name].token_ids) + 1) // BLOCK_SIZE) for name in names]
    pair = VisionPair(folder, num_decode_blocks=sum(needed) + 2)
    numbers = {name: pair.start(prompts[name].token_ids, prompts[name].items(), NUM_NEW) for name in names}
    pair.run()
    for name, number in numbers.items():
        assert_as_expected(pair.generated(number), expected[name])
    assert pair.num_preempted > 0
    pair.close()


def test_bad_media_fail_only_their_prompt(family: str, pair: VisionPair) -> None:
    prompts = prompts_of(family)
    good, image = prompts["text"], prompts["image"].media[0]
    num_tokens = image.num_tokens[0]
    # By its digest alone, the embedding would be found.
    short = VisionPrompt.of([4, Medium("image", image.tensors, [num_tokens - 1]), 4], 8)
    misfit = f"media item 0: this image has {num_tokens - 1} placeholder tokens in the prompt, .* to {num_tokens}"
    number = pair.start(good.token_ids, (), NUM_NEW)
    if family == "llava_onevision":  # known only when it is encoded
        bad_number = pair.start(short.token_ids, short.items(), NUM_NEW)
        pair.run()
        assert re.match(misfit, pair.failures[bad_number])
    else:
        with pytest.raises(InvalidRequest, match=misfit):
            pair.start(short.token_ids, short.items(), NUM_NEW)
        pair.run()
    assert len(pair.generated(number)[0]) == NUM_NEW
