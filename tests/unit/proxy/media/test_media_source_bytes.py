"""The bytes that a client sent are read again from the request's own segment only."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.media_cache.media_segment import offsets_of, write_segment
from tandem.proxy.media.media_lease import HeldSources, SourceBytes, read_sources, sources_key
from tandem.runtime.errors import WorkerLost


def written(file: Path, **items: bytes) -> HeldSources:
    """Writes items, by the first character of their digests."""
    file.touch()
    digests = [name[0].encode() * 32 for name in items]
    write_segment(str(file), sources_key(digests), list(items.values()))
    offsets, _ = offsets_of([len(data) for data in items.values()])
    sources = zip(digests, offsets, items.values(), strict=True)
    return HeldSources(str(file), [SourceBytes("image", digest, offset, len(data)) for digest, offset, data in sources])


def test_each_item_is_read(tmp_path: Path) -> None:
    assert read_sources(written(tmp_path / "a", one=b"1" * 100, two=b"2")) == [b"1" * 100, b"2"]


@pytest.mark.parametrize("content", [b"", b"x" * 1000, None])
def test_a_path_that_leads_to_another_file_is_refused(tmp_path: Path, content: bytes | None) -> None:
    """The request has ended, and its descriptor is another request's now."""
    sources = written(tmp_path / "a", one=b"of a")
    if content is None:
        written(tmp_path / "a", two=b"of b")
    else:
        (tmp_path / "a").write_bytes(content)
    with pytest.raises(WorkerLost):
        read_sources(sources)
    (tmp_path / "a").unlink()
    with pytest.raises(WorkerLost):
        read_sources(sources)
