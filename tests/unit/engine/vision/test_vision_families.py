"""From a request's body to its tokens, for each family: real processing, prefill and decode, without sockets.

The tokens must equal those of transformers alone.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.media_reader import MediaProcessOnLoop
from tests.support.served_vision_models import Part, generated_by_transformers, parts_of, save_served_model
from tests.support.vision_model import clip, picture
from tests.support.vision_pair import VisionPair

NUM_NEW = 16
FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava_onevision")


@pytest.mark.parametrize(
    "family", [FAMILIES[0], *(pytest.param(each, marks=pytest.mark.extended) for each in FAMILIES[1:-1]), FAMILIES[-1]]
)
def test_media_and_text_side_by_side(family: str, tmp_path: Path) -> None:
    save_served_model(family, tmp_path)
    wide, tall, video = picture(60, 40, seed=1), picture(30, 50, seed=2), clip(12)
    prompts: list[list[Part]] = [
        ["What is ", wide, "that?"],
        [video, "And there?"],
        [tall, "before", video, "between", wide, tall, "after"],
        ["Nothing to see here, or in any other line of this text."],
    ]
    expected = generated_by_transformers(tmp_path, prompts, NUM_NEW)
    assert all(len(set(tokens)) > 4 for tokens in expected), "an answer of equal tokens proves nothing"
    reader = MediaProcessOnLoop(tmp_path)
    pair = VisionPair(tmp_path)
    try:
        read = [reader.prompt(*parts_of(prompt)) for prompt in prompts]
        for _ in range(2):  # the second time from the caches
            numbers = [pair.start(token_ids, items, NUM_NEW) for token_ids, items, _ in read]
            pair.run()
            assert [pair.generated(number)[0] for number in numbers] == expected
        assert pair.cache.num_encoded == 3, "each medium is encoded once for all prompts"
    finally:
        pair.close()
        reader.close()
