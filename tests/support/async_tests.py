"""Decorators of tests that are coroutines: each runs in an event loop of its own."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec

from tests.support.clocked_loop import run_in_no_time

P = ParamSpec("P")
LIMIT_S = 30
Run = Callable[[Coroutine[Any, Any, None]], None]
Decorator = Callable[[Callable[P, Coroutine[Any, Any, None]]], Callable[P, None]]


def run_by(run: Run) -> Callable[[Callable[P, Coroutine[Any, Any, None]]], Callable[P, None]]:
    """Returns a decorator of tests that `run` runs."""

    def decorate(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
        def run_test(*arguments: P.args, **named: P.kwargs) -> None:
            run(test(*arguments, **named))

        return like(test, run_test)

    return decorate


def like(test: Callable[..., Any], run_test: Callable[P, None], num_given: int = 0) -> Callable[P, None]:
    """Makes pytest and hypothesis see the arguments of the test, without the first ones, which `run_test` gives it."""
    functools.update_wrapper(run_test, test)
    del run_test.__wrapped__  # type: ignore[attr-defined]  # `update_wrapper` sets it, and a coroutine would be seen
    signature = inspect.signature(test)
    parameters = list(signature.parameters.values())[num_given:]
    run_test.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return run_test


def _in_loop(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, LIMIT_S))


in_loop = run_by(_in_loop)
in_no_time = run_by(run_in_no_time)
"""For tests whose loop's clock jumps instead of waiting."""
