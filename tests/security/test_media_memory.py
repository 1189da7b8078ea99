"""The memory of each sandbox of the real media process is limited; a request that needs more fails alone."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from tests.support.cluster import children_of
from tests.support.hostile_media import with_long_index
from tests.support.media_proxy import data_url, image_part, media_proxy, video_part
from tests.support.vision_model import clip, encoded, picture

GIB = 1 << 30


def memory_of(pid: int, field: str) -> int:
    """Returns a field of the process's status in bytes."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(fields[field].split()[0]) * 1024


@pytest.mark.extended
def test_a_video_bomb_fails_at_the_limit_of_its_sandbox(tmp_path: Path) -> None:
    """The limit is then lowered, so that the test needs little memory: the bomb takes 350 MB without it."""
    image = image_part(data_url(encoded(picture(seed=1))))
    video = video_part(data_url(clip(6), "video/mp4"))
    with media_proxy(tmp_path) as served:
        assert served.chat(image, "and", video).status_code == 200
        pid = served.media_process()
        sandboxes = sorted(children_of(pid))[1:]  # without the fork server
        limits = {each: resource.prlimit(each, resource.RLIMIT_DATA)[0] for each in sandboxes}
        used = {each: limit - memory_of(each, "VmData") for each, limit in limits.items() if limit > 0}
        assert used and all(0 < room <= 2 * GIB for room in used.values())
        for sandbox in sandboxes:
            limit = memory_of(sandbox, "VmData") + (128 << 20)
            resource.prlimit(sandbox, resource.RLIMIT_DATA, (limit, limit))
        before = {each: memory_of(each, "VmHWM") for each in sandboxes}
        bomb = served.chat(video_part(data_url(with_long_index(10_000_000), "video/mp4")))
        assert bomb.status_code in (400, 503), bomb.text
        for sandbox in set(children_of(pid)) & set(sandboxes):  # others have ended at the limit
            assert memory_of(sandbox, "VmHWM") - before[sandbox] <= 128 << 20
        assert served.chat(image, "again").status_code == 200
        assert served.media_process() == pid
