"""Finds the name that a misspelt one was meant to be."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def did_you_mean(name: str, known: Iterable[str], likeness: float = 0.7) -> str:
    """Return "; did you mean 'x'?" for the known name nearest to `name`; "" if none is near."""
    by_letters = {_letters(each): each for each in known}
    near = get_close_matches(_letters(name), by_letters, n=1, cutoff=likeness)
    return f"; did you mean {by_letters[near[0]]!r}?" if near else ""


def checks_keywords(function: Callable[P, T]) -> Callable[P, T]:
    """Suggest a known keyword in the function's TypeError about an unknown one."""
    known = inspect.signature(function).parameters

    @wraps(function)
    def call(*args: P.args, **options: P.kwargs) -> T:
        for name in options:
            if name not in known:
                raise TypeError(
                    f"{function.__qualname__}() got an unexpected keyword argument {name!r}"
                    f"{_within(name, known) or did_you_mean(name, known)}"
                )
        return function(*args, **options)

    return call


def _within(name: str, known: Mapping[str, inspect.Parameter]) -> str:
    for option, parameter in known.items():
        kind = type(parameter.default)
        if is_dataclass(kind) and name in {each.name for each in fields(kind)}:
            return f"; it is part of `{option}`: {option}={kind.__name__}({name}=…)"
    return ""


def _letters(name: str) -> str:
    return name.replace("_", "").lower()
