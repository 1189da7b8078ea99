"""Known weaknesses of the locked dependencies, by pip-audit. Part of `make check`, so it does not fail where no index
answers: it says that nothing was audited. Exit code 1 for a weakness that is known.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

_TIMEOUT_S = 600


def audit(requirements: Path) -> list[dict[str, Any]] | None:
    """pip-audit's word on each dependency, or None when it had none to say, because of the network for one."""
    command = [
        sys.executable, "-m", "pip_audit", "-r", str(requirements), "--no-deps", "--disable-pip", "-f", "json",
        "--progress-spinner", "off", "--timeout", "10",
    ]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
        dependencies: list[dict[str, Any]] = json.loads(done.stdout)["dependencies"]
    except (subprocess.TimeoutExpired, json.JSONDecodeError, KeyError):
        return None
    return dependencies


def tell(dependencies: list[dict[str, Any]] | None) -> tuple[int, list[str]]:
    """(exit code, lines)."""
    if dependencies is None or all("skip_reason" in each for each in dependencies):
        return 0, ["dependencies NOT audited: no index with data about weaknesses could be reached"]
    audited = [each for each in dependencies if "skip_reason" not in each]
    lines = []
    for each in audited:
        for weakness in each["vulns"]:
            mended = ", ".join(weakness["fix_versions"]) or "no version"
            lines.append(f"{each['name']} {each['version']}: {weakness['id']}, mended in {mended}")
    skipped = [each["name"] for each in dependencies if "skip_reason" in each]
    not_audited = f"; NOT audited: {', '.join(skipped)}" if skipped else ""
    return (1 if lines else 0), [*lines, f"{len(audited)} dependencies audited, {len(lines)} weaknesses{not_audited}"]


def main() -> None:
    requirements = Path(sys.argv[1])
    names = [line for line in requirements.read_text().splitlines() if "==" in line and not line.startswith("#")]
    with tempfile.TemporaryDirectory() as folder:
        first = Path(folder) / "one.txt"
        first.write_text(names[0] + "\n")  # one question tells whether there is somebody to ask
        dependencies = audit(first)
    if dependencies is not None and not all("skip_reason" in each for each in dependencies):
        dependencies = audit(requirements)
    exit_code, lines = tell(dependencies)
    print("\n".join(lines))
    sys.exit(exit_code)


if __name__ == "__main__":
    main()
