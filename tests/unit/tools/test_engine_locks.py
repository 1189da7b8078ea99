"""The files that pin what `tandem engine install vllm` installs."""

from __future__ import annotations

import pytest

from tools.engine_locks import WHERE, can_be_installed, requirement_lines


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("six-1.17.0-py2.py3-none-any.whl", True),
        ("six-1.17.0.tar.gz", True),
        ("psutil-7.0.0-cp36-abi3-manylinux_2_12_x86_64.manylinux2014_x86_64.whl", True),
        ("uv-0.13.9-py3-none-manylinux_2_17_aarch64.manylinux2014_aarch64.whl", True),
        ("torch-2.13.0-cp312-cp312-manylinux_2_28_x86_64.whl", True),
        ("torch-2.13.0-1-cp312-cp312-manylinux_2_28_x86_64.whl", True),
        ("torch-2.13.0-cp310-cp310-manylinux_2_28_x86_64.whl", False),
        ("torch-2.13.0-cp314-cp314t-manylinux_2_28_x86_64.whl", False),
        ("torch-2.13.0-cp312-cp312-manylinux_2_28_s390x.whl", False),
        ("torch-2.13.0-cp312-cp312-win_amd64.whl", False),
        ("torch-2.13.0-cp312-cp312-macosx_11_0_arm64.whl", False),
        ("torch-2.13.0-cp312-cp312-musllinux_1_2_x86_64.whl", False),
        ("torch-2.13.0-pp311-pypy311_pp73-manylinux_2_28_x86_64.whl", False),
    ],
)
def test_files_for_the_supported_systems_are_kept(file: str, expected: bool) -> None:
    assert can_be_installed(file) is expected


def test_lines_have_hashes_and_no_addresses() -> None:
    wheels = [
        {"url": f"https://index.example/packages/six-1.0-py3-none-{each}.whl#frag", "hashes": {"sha256": each}}
        for each in ("any", "win_amd64")
    ]
    source = {"name": "six-1.0.tar.gz", "url": "https://index.example/x", "hashes": {"sha256": "source"}}
    package = {"name": "six", "version": "1.0", "wheels": wheels, "sdist": source, "marker": WHERE}
    lines = ["six==1.0 \\", "    --hash=sha256:any \\\n    --hash=sha256:source"]
    assert list(requirement_lines([package])) == lines
    marked = package | {"marker": "python_full_version < '3.12'"}
    assert next(requirement_lines([marked])) == "six==1.0 ; python_full_version < '3.12' \\"
    with pytest.raises(ValueError, match=r"six 1\.0 has no file for Linux on aarch64 or x86_64"):
        list(requirement_lines([package | {"wheels": wheels[1:], "sdist": wheels[1]}]))
