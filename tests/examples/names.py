"""Finds names and keywords of sparkdl that a program uses and that do not exist.

The program is read, not run: imports, attributes, keywords of calls, and what calls return as far
as annotations say it. A variable named `ctx` is the context of a node.
"""

from __future__ import annotations

import ast
import inspect
import sys
from dataclasses import dataclass, field
from importlib import import_module
from types import FunctionType, ModuleType
from typing import Any

CONTEXT = "sparkdl.node.context.NodeContext"
LAUNCH = "sparkdl.driver.launch.launch"
PASS_ON = ("run", "run_elastic", "search")
"""Functions that hand their further options to `launch`."""


def unknown_names(source: str) -> list[str]:
    """Return a complaint for each name and keyword of sparkdl's in `source` that does not exist."""
    reader = _Reader()
    reader.visit(ast.parse(source))
    return reader.complaints


@dataclass(frozen=True)
class _Instance:
    """A value of a class of sparkdl's."""

    kind: type


@dataclass
class _Reader(ast.NodeVisitor):
    """Goes through a program in its order, without scopes.

    Attributes:
        known: modules, functions, classes and instances of sparkdl's, by their name in the program.
    """

    known: dict[str, Any] = field(default_factory=dict)
    complaints: list[str] = field(default_factory=list)

    def visit_Import(self, node: ast.Import) -> None:
        for name in node.names:
            if _is_ours(name.name):
                module = self._module(name.name, node)
                if name.asname:
                    self.known[name.asname] = module
                else:
                    self.known["sparkdl"] = sys.modules["sparkdl"]

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if _is_ours(node.module or ""):
            module = self._module(node.module or "", node)
            for name in node.names:
                self.known[name.asname or name.name] = self._member(module, name.name, node)

    def visit_arg(self, node: ast.arg) -> None:
        annotation = node.annotation
        kind = self._of(annotation) if annotation else None
        if node.arg == "ctx" and annotation is None:
            kind = _object_at(CONTEXT)
        self.known[node.arg] = _Instance(kind) if isinstance(kind, type) else None

    def visit_Assign(self, node: ast.Assign) -> None:
        value = self._of(node.value)
        for target in node.targets:
            self._bind(target, value)

    def visit_withitem(self, node: ast.withitem) -> None:
        value = self._of(node.context_expr)
        if node.optional_vars:
            self._bind(node.optional_vars, value)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self._of(node)

    def visit_Call(self, node: ast.Call) -> None:
        self._of(node)

    def _bind(self, target: ast.expr, value: Any) -> None:
        if isinstance(target, ast.Name):
            self.known[target.id] = value
        else:
            self.visit(target)

    def _of(self, node: ast.expr) -> Any:
        """Return what an expression is, if it is sparkdl's."""
        if isinstance(node, ast.Name):
            return self.known.get(node.id)
        if isinstance(node, ast.Attribute):
            return self._member(self._of(node.value), node.attr, node)
        if not isinstance(node, ast.Call):
            self.generic_visit(node)
            return None
        called = self._of(node.func)
        for argument in (*node.args, *(keyword.value for keyword in node.keywords)):
            self.visit(argument)
        if callable(called):
            self._check_keywords(called, node)
            return _returned_by(called)
        return None

    def _member(self, owner: Any, name: str, node: ast.AST) -> Any:
        if owner is None:
            return None
        kind = owner.kind if isinstance(owner, _Instance) else owner
        if isinstance(owner, _Instance) and name in _fields(kind):
            return None
        if "__getattr__" in vars(kind) and not hasattr(kind, "__all__") and name not in vars(kind):
            return None  # made on demand, for which a framework would be imported
        try:
            member = getattr(kind, name)
        except AttributeError:
            if hasattr(kind, "__path__"):  # a package
                return self._module(f"{kind.__name__}.{name}", node)
            self._complain(node, f"{kind.__name__} has no {name}")
            return None
        if isinstance(member, property):
            return _returned_by(member.fget)
        return member if hasattr(member, "__name__") else None

    def _module(self, name: str, node: ast.AST) -> ModuleType | None:
        try:
            return import_module(name)
        except ModuleNotFoundError:
            self._complain(node, f"there is no {name}")
            return None

    def _check_keywords(self, called: Any, node: ast.Call) -> None:
        taken = dict(inspect.signature(called).parameters)
        is_stage = hasattr(called, "hasParam")  # of Spark ML: takes its parameters by name
        further = next((n for n, each in taken.items() if each.kind is each.VAR_KEYWORD), None)
        if further == "options" and called.__name__ in PASS_ON:
            taken.update(inspect.signature(_object_at(LAUNCH)).parameters)
        elif further and not is_stage:
            return
        for keyword in node.keywords:
            is_parameter = is_stage and hasattr(called, keyword.arg or "")
            if keyword.arg and keyword.arg not in taken and not is_parameter:
                self._complain(node, f"{called.__name__} takes no {keyword.arg}")

    def _complain(self, node: ast.AST, what: str) -> None:
        self.complaints.append(f"line {getattr(node, 'lineno', 0)}: {what}")


def _is_ours(name: str) -> bool:
    return name.partition(".")[0] == "sparkdl"


def _fields(kind: type) -> set[str]:
    """Return the names of what instances have, and the class may not."""
    found: set[str] = set()
    for each in kind.__mro__:
        found.update(inspect.get_annotations(each))
        if isinstance(init := vars(each).get("__init__"), FunctionType):
            found.update(init.__code__.co_names)  # which it sets, or reads
    return found


def _object_at(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)


def _returned_by(called: Any) -> _Instance | None:
    """Return an instance of what a function says that it returns, if that is a class of ours."""
    if isinstance(called, type):
        kind: Any = called
    else:
        annotation = str(getattr(called, "__annotations__", {}).get("return", ""))
        kind = getattr(inspect.unwrap(called), "__globals__", {}).get(
            annotation.removesuffix(" | None")
        )
    return _Instance(kind) if isinstance(kind, type) and _is_ours(kind.__module__) else None
