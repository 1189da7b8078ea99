"""The tables of fields, ranges and defaults in docs/api.md equal those of the code."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.proxy.answers.errors import _STATUS
from tandem.proxy.api.schema import NotServed
from tandem.proxy.http.openapi import ERRORS, FieldRow, docs_page, documented_path, field_rows
from tests.support.openapi import documented_routes, openapi_of

PAGE = Path(__file__).parents[4] / "docs" / "api.md"
DOCUMENT = openapi_of("MODEL", has_api_key=True)
ROUTES = documented_routes("MODEL", has_api_key=True)


def rows_of(schema_name: str) -> list[FieldRow]:
    """Returns the fields of a completion or a chat that are served."""
    return [row for row in field_rows(DOCUMENT, schema_name) if row.name not in NotServed.__struct_fields__]


def table(*lines: list[str]) -> str:
    head, *rows = [f"| {' | '.join(cells)} |" for cells in lines]
    return "\n".join([head, "|" + " --- |" * len(lines[0]), *rows])


def field_table(rows: list[FieldRow]) -> str:
    cells = [[f"`{row.name}`", row.values.replace("|", "\\|"), row.default, row.description] for row in rows]
    return table(["field", "values", "default", "meaning"], *cells)


def tables() -> dict[str, str]:
    """Returns the generated tables by the heading above them."""
    completion, chat = rows_of("CompletionRequest"), rows_of("ChatCompletionRequest")
    of_all = field_rows(DOCUMENT, "ChatCompletionRequest")
    made = {
        "Endpoints": table(
            ["path", "answer", "key"],
            *([f"`{r.method} {documented_path(r)}`", r.summary, "no" if r.is_open else "yes"] for r in ROUTES),
        ),
        "Fields of both": field_table([row for row in completion if row in chat]),
        "Fields of completions": field_table([row for row in completion if row not in chat]),
        "Fields of chats": field_table([row for row in chat if row not in completion]),
        "Not served": table(
            ["field", "accepted"],
            *([f"`{row.name}`", row.values] for row in of_all if row.name in NotServed.__struct_fields__),
        ),
        "Errors": table(["status", "when"], *([str(status), when] for status, when in ERRORS.items())),
    }
    parts = ["ChatMessage", "ContentPart", "MediaUrl", "ToolCall", "FunctionCall", "StreamOptions"]
    for name in (
        *parts,
        "TokenizeRequest",
        "DetokenizeRequest",
        "TokenizeResponse",
        "EmbeddingRequest",
        "MessageRequest",
        "ResponseRequest",
        "InputItem",
        "InputPart",
        "ResponseTool",
        "BatchRequest",
    ):
        made[name] = field_table(field_rows(DOCUMENT, name))
    return made


@pytest.mark.parametrize("heading", tables())
def test_the_api_page_has_the_generated_table(heading: str) -> None:
    _, found, after = PAGE.read_text().partition(f"# {heading}\n")
    assert found, f"docs/api.md has no heading {heading!r}"
    section = after.partition("\n#")[0]
    shown = "\n".join(line for line in section.splitlines() if line.startswith("|"))
    assert shown == tables()[heading], f"the table of {heading!r} in docs/api.md should be:\n{tables()[heading]}"


def test_every_error_that_is_sent_is_described() -> None:
    assert {*_STATUS.values(), 405, 500} - {409, 499} == ERRORS.keys(), "409 is of the admin address, 499 is never sent"


def test_the_docs_page_links_every_body_and_path() -> None:
    page = docs_page(DOCUMENT)
    for name in DOCUMENT["components"]["schemas"]:
        assert f'id="{name}"' in page
    for route in ROUTES:
        assert f"{route.method} {documented_path(route)}" in page
    assert all(f'id="{target}"' in page for target in {part.split('"')[0] for part in page.split('href="#')[1:]})
