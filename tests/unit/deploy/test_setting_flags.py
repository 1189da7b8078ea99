"""`--help` shows the flags that most users need, `--help-all` shows all."""

from __future__ import annotations

import re
import sys

import pytest

from tandem.deploy import cli
from tandem.deploy.cluster_config import settings
from tandem.deploy.configuration_page import page
from tandem.runtime.settings import Group


def shown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str:
    """Returns what the command prints before it exits with 0."""
    monkeypatch.setattr(sys, "argv", ["tandem", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code
    return capsys.readouterr().out


def flags(text: str) -> set[str]:
    """Returns the flags that have an entry of their own."""
    return set(re.findall(r"^  (--[\w-]+)", text, re.MULTILINE))


def names(keys: tuple[str, ...]) -> set[str]:
    return {"--" + key.replace("_", "-") for key in keys}


def test_the_command_alone_prints_its_help(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(capsys, monkeypatch) == shown(capsys, monkeypatch, "--help")


def test_the_help_of_up_has_the_common_flags_and_examples(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = shown(capsys, monkeypatch, "up", "--help")
    assert flags(text) == names(cli.COMMON) | {"--config", "--help-all"}
    for example in re.findall(r"tandem (up --model .*)", text):
        cli._parser().parse_args(example.split())
    assert len(re.findall(r"^  .*: +tandem up", text, re.MULTILINE)) == 3


def test_the_whole_help_has_every_flag_under_its_heading(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = shown(capsys, monkeypatch, "up", "--help-all")
    keys = {setting.key for setting in settings()} - set(cli.WORKER_ONLY)
    assert flags(text) == names(tuple(keys)) | {"--config", "--help-all"}
    headings = re.findall(r"^([\w -]+):$", text, re.MULTILINE)
    assert headings == ["options", "common flags", *Group.__args__]  # type: ignore[attr-defined]
    assert "NODEFAULT" not in text + page()


def test_the_help_of_a_worker_leaves_out_what_concerns_proxies(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = names(cli.COMMON_OF_WORKERS) | {"--config", "--count", "--help-all"}
    assert flags(shown(capsys, monkeypatch, "worker", "--help")) == expected
