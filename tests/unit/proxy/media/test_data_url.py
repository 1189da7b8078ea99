"""Data URLs are read in any form that clients send, and refused beyond their size."""

from __future__ import annotations

import base64
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.proxy.media.fetch import read_file
from tandem.proxy.media.media_limits import MediaLimits
from tandem.proxy.media.source import InvalidMedia, MediaSource, decode_data_url, is_data_url
from tandem.runtime.errors import InvalidRequest

LIMITS = MediaLimits(max_bytes=1000)


def source(url: str) -> MediaSource:
    return MediaSource(3, "image", url, "messages[0].content[1]")


@given(st.text(max_size=60) | st.text(max_size=40).map(lambda text: f"data:image/png;base64,{text}"))
def test_any_url_is_read_or_refused(url: str) -> None:
    try:
        decode_data_url(source(url), LIMITS) if is_data_url(source(url)) else read_file(source(url), LIMITS)
    except InvalidRequest as error:
        assert "messages[0].content[1]" in error.message


BYTES = bytes(range(256)) + b"\xfb\xff\xfe"
STANDARD, FOR_URLS = base64.b64encode(BYTES).decode(), base64.urlsafe_b64encode(BYTES).decode()


@pytest.mark.parametrize(
    "url",
    [
        f"data:image/png;base64,{STANDARD}",
        f"data:image/png;base64, {STANDARD} ",
        f"data:image/jpg;base64,{STANDARD.rstrip('=')}",
        f"data:image/png;base64,{FOR_URLS}",
        f"data:IMAGE/PNG;BASE64,{FOR_URLS.rstrip('=')}",
        f"data:image/png;charset=utf-8;base64,{quote(STANDARD, safe='')}",
        f"data: image/png ; base64 ,{STANDARD}",
        f"data:;base64,{STANDARD}==",
        f"data:binary/octet-stream;base64,{STANDARD}",
        f"data:image;base64,{STANDARD}",
        "data:image/png;base64," + "\r\n".join(STANDARD[i : i + 76] for i in range(0, len(STANDARD), 76)) + "\n",
        "data:image/png;base64," + "%0A".join(STANDARD[i : i + 64] for i in range(0, len(STANDARD), 64)),
        f"data:image/png,{quote(BYTES)}",
    ],
)
def test_base64_in_any_form_is_read(url: str) -> None:
    assert decode_data_url(source(url), LIMITS) == BYTES


@pytest.mark.parametrize("data", ["AAAAA", "A*AA", "A=AA"])
def test_what_is_no_base64_is_refused(data: str) -> None:
    with pytest.raises(InvalidMedia, match="not valid base64"):
        decode_data_url(source(f"data:image/png;base64,{data}"), LIMITS)


def test_the_size_of_base64_counts_without_its_line_ends() -> None:
    lines = "\n".join(base64.b64encode(bytes(1000)).decode())
    assert len(decode_data_url(source(f"data:image/png;base64,{lines}"), LIMITS)) == LIMITS.max_bytes
    with pytest.raises(InvalidMedia, match="more than 1000 bytes"):
        decode_data_url(source(f"data:image/png;base64,{base64.b64encode(bytes(1001)).decode()}"), LIMITS)
