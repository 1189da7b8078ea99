"""The adapters' names, shared by proxies through a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.protocol.messages.dispatch import AdapterRef
from tandem.proxy.cluster.adapter_table import AdapterNotFound, AdapterTable, NamedAdapter
from tandem.runtime.files.lora_files import AdapterFiles, InvalidAdapter

SHAPES = {"q_proj": (2, 2)}
FILES = AdapterFiles("digest", 1, 1.0, SHAPES, b"")
INITIAL = [NamedAdapter("initial", AdapterRef("0", "/initial"))]


def test_proxies_see_each_others_adapters(tmp_path: Path) -> None:
    one, other = (AdapterTable(tmp_path / "adapters.json", INITIAL, "base") for _ in range(2))
    one.load("a", FILES, Path("/a"), SHAPES)
    assert [adapter.name for adapter in other.all()] == ["initial", "a"]
    assert other.get("a") == one.get("a") != None  # noqa: E711
    other.unload("initial")
    assert one.get("initial") is None
    restarted = AdapterTable(tmp_path / "adapters.json", INITIAL, "base")
    assert [adapter.name for adapter in restarted.all()] == ["a"], "what was unloaded stays unloaded"


def test_names_are_unique(tmp_path: Path) -> None:
    table = AdapterTable(tmp_path / "adapters.json", INITIAL, "base")
    with pytest.raises(InvalidAdapter, match="loaded from /initial"):
        table.load("initial", FILES, Path("/a"), SHAPES)
    with pytest.raises(InvalidAdapter, match="served model's name"):
        table.load("base", FILES, Path("/a"), SHAPES)
    table.load("initial", FILES, Path("/a"), SHAPES, replace=True)
    assert table.all()[0].ref == AdapterRef("digest", "/a")
    with pytest.raises(AdapterNotFound):
        table.unload("b")
