"""The one line that users see of another library's error."""

from __future__ import annotations

import pytest

from tandem.runtime.errors import first_line


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("no such file\nhint: look elsewhere"), "no such file"),
        (ValueError("\n  no such file  \n"), "no such file"),
        (
            ValueError("Field 'rope_parameters':\n\n    TypeError: no dict\n"),
            "Field 'rope_parameters': TypeError: no dict",
        ),
        (ValueError("it failed:"), "it failed:"),
        (EOFError(), "EOFError"),
        (KeyError("metadata"), "KeyError: 'metadata'"),
        (KeyError(), "KeyError"),
    ],
)
def test_the_line_says_what_is_wrong(error: Exception, line: str) -> None:
    assert first_line(error) == line
