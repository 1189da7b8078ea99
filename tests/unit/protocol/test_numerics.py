"""Numerics: each field is part of the digest, and the first that differs is named with both values."""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace

from tandem.protocol.messages.numerics import Numerics

OURS = Numerics(engine="tandem 1", libraries="torch 2", instruction_set="avx512", dtype="bfloat16", num_threads=1)


@pytest.mark.parametrize("field", Numerics.__struct_fields__)
def test_each_field_changes_the_digest_and_is_named(field: str) -> None:
    value = getattr(OURS, field)
    theirs = replace(OURS, **{field: value + "x" if isinstance(value, str) else value + 1})
    assert theirs.digest != OURS.digest
    assert OURS.first_difference(theirs) == (field, str(value) or "none", str(getattr(theirs, field)))


def test_equal_numerics_have_equal_digests_in_every_process() -> None:
    copy = msgspec.msgpack.decode(msgspec.msgpack.encode(OURS), type=Numerics)
    assert copy.digest == OURS.digest and len(bytes.fromhex(OURS.digest)) == 8
    assert OURS.first_difference(copy) is None
    assert copy == OURS and "digest" not in msgspec.to_builtins(OURS)


def test_the_wording_of_a_problem_is_no_difference_but_that_there_is_one_is() -> None:
    first, second = replace(OURS, problem="the batch matters"), replace(OURS, problem="chunks matter")
    assert first.digest == second.digest != OURS.digest
    assert first.first_difference(second) is None
    assert OURS.first_difference(first) == ("problem", "none", "the batch matters")


def test_values_do_not_run_into_each_other() -> None:
    assert Numerics(engine="ab", libraries="c").digest != Numerics(engine="a", libraries="bc").digest
