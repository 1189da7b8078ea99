"""The collector does not look at what was loaded, and looks at everything after that."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from tandem.runtime.collector import freeze_loaded_objects, while_loading


class Node:
    """Refers to itself."""

    def __init__(self) -> None:
        self.me = self


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    thresholds = gc.get_threshold()
    yield
    gc.enable()
    gc.set_threshold(*thresholds)
    gc.unfreeze()


def test_what_is_loaded_is_not_looked_at_again() -> None:
    with while_loading():
        assert not gc.isenabled()
        loaded = [[] for _ in range(1000)]
    assert gc.isenabled()
    assert gc.get_freeze_count() >= len(loaded)
    assert not any(each is loaded for each in gc.get_objects())


def test_it_goes_on_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError), while_loading():
        raise ZeroDivisionError
    assert gc.isenabled()


def test_garbage_of_before_goes_and_of_later_is_found() -> None:
    thresholds = gc.get_threshold()
    before = weakref.ref(Node())
    freeze_loaded_objects()
    assert before() is None
    later = weakref.ref(Node())
    assert later() is not None
    gc.collect()
    assert later() is None
    assert gc.get_threshold()[:2] == thresholds[:2] and gc.get_threshold()[2] > thresholds[2]
