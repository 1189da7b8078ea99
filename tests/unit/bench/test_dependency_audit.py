"""What the audit says of pip-audit's answers, and when it fails."""

from __future__ import annotations

from bench.dependency_audit import tell

SOUND = {"name": "a", "version": "1", "vulns": []}
WEAK = {"name": "b", "version": "2", "vulns": [{"id": "CVE-1", "fix_versions": ["3"]}]}
SKIPPED = {"name": "c", "skip_reason": "Dependency not found"}


def test_a_known_weakness_fails() -> None:
    code, lines = tell([SOUND, WEAK, SKIPPED])
    assert code == 1
    assert lines == ["b 2: CVE-1, mended in 3", "2 dependencies audited, 1 weaknesses; NOT audited: c"]


def test_without_an_index_it_says_so_and_does_not_fail() -> None:
    for answer in (None, [SKIPPED, SKIPPED]):
        code, lines = tell(answer)
        assert code == 0 and "NOT audited" in lines[0]


def test_sound_dependencies() -> None:
    assert tell([SOUND]) == (0, ["1 dependencies audited, 0 weaknesses"])
