"""User code is pickled by value, and what refuses is named."""

from __future__ import annotations

import threading
from argparse import Namespace
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import cloudpickle
import pytest

from sparkdl.core.errors import ConfigError
from sparkdl.driver.payload import pickle_user_code, pickled

LOCK = threading.Lock()
"""What no pickle takes."""
NUMBER = 7


def plain(args: Any, ctx: Any, extra: Any = None) -> Any:
    return args, ctx, NUMBER


def uses_global(args: Any, ctx: Any) -> Any:
    return NUMBER, LOCK.locked()


def by_value(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function as one of `__main__`, whose globals are pickled with it."""
    function.__module__ = "__main__"
    return function


def uses_closure() -> Callable[..., Any]:
    connection, count = LOCK, 3

    def map_fun(args: Any, ctx: Any) -> Any:
        return connection.locked(), count

    return map_fun


def decorated() -> Callable[..., Any]:
    connection = LOCK

    @wraps(plain)
    def map_fun(args: Any, ctx: Any) -> Any:
        return plain(connection, ctx)

    return map_fun


def test_function_and_arguments_come_back_from_the_payload() -> None:
    payload = pickle_user_code(plain, Namespace(steps=3))
    function, args = cloudpickle.loads(payload)
    assert function(args, "ctx") == (Namespace(steps=3), "ctx", 7)


@pytest.mark.parametrize(
    ("map_fun", "args", "unpicklable"),
    [
        (uses_closure(), None, "the variable 'connection' (_thread.lock)"),
        (by_value(uses_global), None, "the variable 'LOCK' (_thread.lock)"),
        (by_value(decorated()), None, "the variable 'connection' (_thread.lock)"),
        (partial(uses_closure()), None, "the variable 'connection' (_thread.lock)"),
        (plain, Namespace(steps=3, sc=LOCK), "the argument 'sc' (_thread.lock)"),
        (plain, {"steps": 3, "sc": LOCK}, "the argument 'sc' (_thread.lock)"),
        (plain, LOCK, "the argument 'args' (_thread.lock)"),
        (plain, {"a": {"b": LOCK}}, "the argument 'a' (builtins.dict)"),
        (uses_closure(), Namespace(sc=LOCK, x=LOCK),
         "the variable 'connection' (_thread.lock); the argument 'sc' (_thread.lock); "
         "the argument 'x' (_thread.lock)"),
    ],
)  # fmt: skip
def test_what_refuses_to_be_pickled_is_named(
    map_fun: Callable[..., Any], args: Any, unpicklable: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        pickle_user_code(map_fun, args)
    text = str(refused.value)
    assert text.startswith(
        f"map_fun and its arguments go to the executors by pickle, which refuses {unpicklable} ("
    )
    assert "Create it inside map_fun" in text
    assert refused.value.__cause__ is not None


class Refuses:
    def __reduce__(self) -> str:
        raise RuntimeError("not me")


def test_whatever_pickle_raises_is_a_config_error_with_the_reason() -> None:
    with pytest.raises(ConfigError, match=r"the argument 'x' .*\(RuntimeError: not me\)"):
        pickle_user_code(plain, {"x": Refuses()})


@pytest.mark.parametrize("map_fun", [lambda args: None, lambda: None, partial(plain, 1, 2)])
def test_function_that_cannot_take_args_and_ctx_is_refused(map_fun: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match=r"map_fun is called as .*\(args, ctx\)"):
        pickle_user_code(map_fun, None)


@pytest.mark.parametrize("map_fun", [print, lambda *both: None, partial(plain, extra=3)])
def test_function_that_may_take_args_and_ctx_is_accepted(map_fun: Callable[..., Any]) -> None:
    assert pickle_user_code(map_fun, None)


def test_code_that_travels_keeps_the_file_that_tracebacks_name() -> None:
    def outer(args: Any) -> Any:
        return lambda: args

    again = cloudpickle.loads(pickled(outer, None))[0]
    assert again.__code__.co_filename == again(1).__code__.co_filename == __file__
