"""Writes the public names with their parameters and defaults: `python -m scripts.public_api`.

`tests/public_api.txt` has them, so that a commit that changes one shows it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any

from pyspark.ml.param import Param

import sparkdl
from sparkdl.ml.params import TABLE

PATH = Path(__file__).parents[1] / "tests" / "public_api.txt"


def api() -> str:
    """Return a line for each public name, method and parameter, in the order of the names."""
    lines: list[str] = []
    for name in sorted(sparkdl.__all__):
        lines += _lines(name, getattr(sparkdl, name))
    return "\n".join((*lines, ""))


def _lines(name: str, member: Any) -> Iterator[str]:
    if inspect.ismodule(member):
        yield name
        for each in sorted(vars(member).get("__all__") or _classes(member)):
            yield from _lines(f"{name}.{each}", getattr(member, each))
    elif inspect.isclass(member):
        yield f"{name}({', '.join(each.__name__ for each in member.__bases__)})"
        own = {
            each: value
            for base in reversed(member.__mro__)
            if base.__module__.partition(".")[0] == "sparkdl"
            for each, value in vars(base).items()
            if each == "__init__" or not each.startswith("_")
        }
        for each, value in () if issubclass(member, Exception) else sorted(own.items()):
            if isinstance(value, Param):
                yield f"    {each}={TABLE[each].default!r}"
            # Each parameter has a setter and a getter, and Spark's name of it is an `attrgetter`.
            elif not re.match("[gs]et[A-Z]", each) and not _is_alias(value):
                yield from _lines(f"{name}.{each}", value)
    elif callable(member) or isinstance(member, (classmethod, staticmethod)):
        yield name
        for each in inspect.signature(getattr(member, "__func__", member)).parameters.values():
            if each.name not in ("self", "cls"):
                yield f"    {_parameter(each)}"
    else:
        yield name


def _is_alias(member: Any) -> bool:
    return isinstance(member, property) and isinstance(member.fget, attrgetter)


def _classes(module: Any) -> Iterator[str]:
    """Return the names of the classes and functions that a module without `__all__` defines."""
    return (
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", "") == module.__name__
    )


def _parameter(parameter: inspect.Parameter) -> str:
    text = str(parameter.replace(annotation=parameter.empty))
    text = re.sub(r" at 0x[0-9a-f]+", "", text)
    return f"*, {text}" if parameter.kind is parameter.KEYWORD_ONLY else text


if __name__ == "__main__":
    PATH.write_text(api(), encoding="utf-8")
