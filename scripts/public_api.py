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


_GIVEN = (sparkdl.Cluster, sparkdl.NodeContext)
"""Classes whose objects users are given: their constructors are internal."""


def api() -> str:
    """Return a line for each public name, method and argument, in the order of the names.

    A last part has a line for each parameter of Spark ML, with its default and the classes that
    have it.
    """
    lines: list[str] = []
    owners: dict[str, list[str]] = {}
    for name in sorted(sparkdl.__all__):
        member = getattr(sparkdl, name)
        lines += _lines(name, member)
        for each, value in _members(member) if inspect.isclass(member) else ():
            if isinstance(value, Param):
                owners.setdefault(each, []).append(name)
    for each, names in sorted(owners.items()):
        lines.append(f"{each}={TABLE[each].default!r}: {', '.join(names)}")
    return "\n".join((*lines, ""))


def _lines(name: str, member: Any) -> Iterator[str]:
    if inspect.ismodule(member):
        yield name
        for each in sorted(vars(member).get("__all__") or _classes(member)):
            yield from _lines(f"{name}.{each}", getattr(member, each))
    elif inspect.isclass(member):
        yield f"{name}({', '.join(each.__name__ for each in member.__bases__)})"
        fields = set(getattr(member, "__dataclass_fields__", ()))
        for each, value in () if issubclass(member, Exception) else _members(member):
            if each == "__init__":
                yield from () if member in _GIVEN else _arguments(value)
            # Each parameter has a setter and a getter, and Spark's name of it is an `attrgetter`.
            elif not (each in fields or re.match("[gs]et[A-Z]", each) or _is_param(value)):
                yield from _lines(f"{name}.{each}", value)
    else:
        yield name
        if callable(member) or isinstance(member, (classmethod, staticmethod)):
            yield from _arguments(getattr(member, "__func__", member))


def _members(kind: type) -> list[tuple[str, Any]]:
    own = {
        each: value
        for base in reversed(kind.__mro__)
        if base.__module__.partition(".")[0] == "sparkdl"
        for each, value in vars(base).items()
        if each == "__init__" or not each.startswith("_")
    }
    return sorted(own.items())


def _arguments(function: Any) -> Iterator[str]:
    for each in inspect.signature(function).parameters.values():
        if each.name not in ("self", "cls"):
            yield f"    {_parameter(each)}"


def _is_param(member: Any) -> bool:
    is_alias = isinstance(member, property) and isinstance(member.fget, attrgetter)
    return is_alias or isinstance(member, Param)


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
