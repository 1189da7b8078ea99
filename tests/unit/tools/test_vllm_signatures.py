"""What `tools.vllm_signatures` says of two versions, as files that look like vLLM's."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from tools import vllm_signatures
from tools.vllm_signatures import Sources, differences

CORE = "vllm/v1/engine/core.py"
OURS = {
    CORE: '''
        from vllm.v1.engine.base import Base
        class EngineCore(Base):
            running: int = 0
            def __init__(self, config):
                self.scheduler = config
                self.structured_output_manager.grammar_init(config)
            def add_request(self, request, wave=0):
                """Adds it."""
                return request
            def unused(self):
                return 1
    ''',
    "vllm/v1/engine/base.py": """
        class Base:
            def post_step(self, has_computed):
                pass
    """,
    "vllm/v1/engine/__init__.py": """
        if True:
            from .core import EngineCore
    """,
}
NOTHING: tuple[list[str], list[str]] = ([], [])


def make(folder: Path, changes: dict[str, tuple[str, str]]) -> Path:
    """Writes the files, in each of which a text may be replaced."""
    for name, text in OURS.items():
        lines = text.replace(*changes.get(name, ("", ""))).splitlines()
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("\n".join(line.removeprefix(" " * 8) for line in lines))
    return folder


def compared(tmp_path: Path, *change: str, file: str = CORE) -> tuple[list[str], list[str]]:
    before, after = make(tmp_path / "before", {}), make(tmp_path / "after", {file: change} if change else {})  # type: ignore[dict-item]
    return differences(Sources(before), Sources(after))


@pytest.fixture(autouse=True)
def used(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"running", "scheduler", "add_request", "post_step"}
    monkeypatch.setattr(vllm_signatures, "used_by_workers", lambda: (["vllm.v1.engine.EngineCore"], names))


def test_equal_versions_do_not_differ(tmp_path: Path) -> None:
    assert compared(tmp_path) == NOTHING


@pytest.mark.parametrize(
    ("file", "old", "new", "name"),
    [
        (CORE, "wave=0", "wave=1", "add_request"),
        (CORE, "add_request", "enqueue", "add_request"),
        (CORE, "running: int = 0", "running: int = 1", "running"),
        (CORE, "self.scheduler =", "self.policy =", "scheduler"),
        (CORE, "__init__(self, config)", "__init__(self, config, port)", "__init__"),
        ("vllm/v1/engine/base.py", "has_computed", "", "post_step"),
    ],
)
def test_what_is_declared_differently_is_found(tmp_path: Path, file: str, old: str, new: str, name: str) -> None:
    found, _ = compared(tmp_path, old, new, file=file)
    assert [each.splitlines()[0] for each in found] == [f"vllm.v1.engine.EngineCore.{name}"]


def test_other_code_is_named_and_other_documentation_is_not(tmp_path: Path) -> None:
    assert compared(tmp_path, "return request", "return None") == ([], ["vllm.v1.engine.EngineCore.add_request"])
    assert compared(tmp_path, '"""Adds it."""', '"""Adds one."""') == NOTHING
    assert compared(tmp_path, "return 1", "return 2") == NOTHING


def test_a_new_call_of_an_object_that_workers_replace_is_found(tmp_path: Path) -> None:
    found, _ = compared(tmp_path, "manager.grammar_init", "manager.grammar_begin")
    assert found == ["structured_output_manager, which is a VllmGrammars\n  + grammar_begin"]


def test_a_name_that_is_gone_is_found_and_a_wheel_is_read(tmp_path: Path) -> None:
    wheel = tmp_path / "vllm.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("vllm/v1/engine/__init__.py", "")
    found, _ = differences(Sources(make(tmp_path / "before", {})), Sources(zipfile.Path(wheel)))
    assert found[0] == "vllm.v1.engine.EngineCore\n  - class EngineCore(Base)\n  + none"
