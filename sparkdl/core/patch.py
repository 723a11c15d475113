"""Replacing a framework's function in place, if the function is as expected.

Runs in: driver, feeder, child
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from types import CodeType
from typing import Any, TypeAlias

_SHIMMED = "_sparkdl_shimmed"
Function: TypeAlias = Callable[..., Any]


@dataclass(frozen=True)
class Patch:
    target: str
    """`module:attribute` or `module:Class.attribute`."""
    parameters: tuple[str, ...]
    """The first parameters of the stock function."""
    replacement: Function | None = None
    """Called with the stock function and its arguments; `None` changes nothing."""
    mentions: tuple[str, ...] = ()
    """Names that the stock function must use for this or another patch to work."""

    def find(self) -> Any:
        """Return the function, or `None` where Keras has none of that name."""
        module, _, path = self.target.partition(":")
        try:
            return functools.reduce(getattr, path.split("."), import_module(module))
        except (ImportError, AttributeError):
            return None

    def objection(self) -> str:
        """Return what about the installed Keras forbids this patch, or nothing."""
        stock = self.find()
        if stock is None:
            return f"it has no {self.target}"
        parameters = tuple(inspect.signature(stock).parameters)
        if parameters[: len(self.parameters)] != self.parameters:
            return f"{self.target} takes {parameters}, not {self.parameters}"
        absent = set(self.mentions) - _names(inspect.unwrap(stock).__code__)
        return f"{self.target} does not use {sorted(absent)}" if absent else ""

    def apply(self) -> None:
        stock, replacement = self.find(), self.replacement
        if replacement is None or hasattr(stock, _SHIMMED):
            return

        @functools.wraps(stock)
        def shimmed(*args: Any, **kwargs: Any) -> Any:
            return replacement(stock, *args, **kwargs)

        setattr(shimmed, _SHIMMED, True)
        module, _, path = self.target.partition(":")
        *owner, name = path.split(".")
        setattr(functools.reduce(getattr, owner, import_module(module)), name, shimmed)


def _names(code: CodeType) -> set[str]:
    # Comprehensions and inner functions are code objects of their own, among the constants.
    within = [_names(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return {*code.co_names, *code.co_freevars}.union(*within)
