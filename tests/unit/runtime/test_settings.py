"""Structs with other values, whose fields are named alone."""

from __future__ import annotations

import msgspec
import pytest

from tandem.runtime.settings import with_values


class Inner(msgspec.Struct, frozen=True):
    limit: int = 1
    name: str = "inner"


class Outer(msgspec.Struct, frozen=True):
    name: str = "outer"
    inner: Inner = Inner()


def test_a_field_of_a_nested_struct_is_named_alone_and_own_fields_come_first() -> None:
    assert with_values(Outer(), {"limit": 2, "name": "new"}) == Outer("new", Inner(2, "inner"))
    assert with_values(Outer(), {"inner": Inner(3)}) == Outer("outer", Inner(3))


def test_unknown_names_are_refused() -> None:
    with pytest.raises(TypeError, match="limt"):
        with_values(Outer(), {"limt": 2})
