"""Error texts keep one form: what happened, the value, the rule, the fix.

The rules are functions from a text to complaints. They read the source alone, so that they also
check the texts of errors that no other test raises.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "sparkdl"

PLAIN = (
    *("ValueError", "TypeError", "KeyError", "RuntimeError", "TimeoutError", "OSError"),
    *("ImportError", "FileNotFoundError"),
)
REFUSALS = {"ConfigError", "ValueError", "TypeError"}  # the caller gave what cannot work

HOLE = "\N{REPLACEMENT CHARACTER}"  # stands for a formatted value
ADVICE = f"{HOLE}advice"  # stands for a fix that other code words

VALUE = re.compile(rf"{HOLE}|\w=|\w\(|--\w|\b[a-z]+_[a-z_]+\b|\b[A-Z]\w*[a-z][A-Z]")
"""A formatted value, or what the program says: an option, a call, the name of a parameter."""

RULE = (
    r"\b(must|needs?|cannot|can't|can (only )?be|only|takes?|expected|instead|already|unexpected|"
    r"one of|either|neither|at (least|most)|or (more|later|newer)|above|all but)\b|advice\b|"
    rf"\b((its|the|'s) columns|outputs|queues|it) (are|has|have|is) {HOLE}"
)
FIXES = (
    *("add", "ask", "build", "call", "cast", "change", "choose", "convert", "declare", "define"),
    *("delete", "detach", "drop", "export", f"feed(?! *{HOLE})", "fill", "flatten", "give"),
    *("import", "index", "install", "iterate", "join", "launch", "leave", "load", "lower", "make"),
    *("name", "order", "pass", "pip install", "profile", "put", "raise", "reduce", "register"),
    *("remove", "rename", "repair", "replace", "return", "rewrite", "run", "save", "scale", "set"),
    *("start", "step", "synchronize", "train", "unset", "use", "wrap", "write"),
)
FIX = rf"(^|[.:;,(] |\b(or|and|to|then) )({'|'.join(FIXES)})\b"

QUOTED = (
    "says why a DataFrame is not read by nodes or by Python; the error that quotes it has a fix"
)
EXCEPTIONS = {  # files, or texts within files, that need neither value nor rule: why
    "driver/executors/parquet_scan.py": QUOTED,
    "driver/executors/plan.py": QUOTED,
    "driver/executors/plan_filter.py": QUOTED,
    "feed/parquet/scan.py": QUOTED,
    "ml/scoring/transform.py": QUOTED,
    "control/messages.py": "quoted in the ProtocolError about the message",
    "control/values.py": "quoted in the ProtocolError about the result",
    "feed/values/ndarrays.py": "quoted in the FeedTypeError that names column and fix",
    "ml/estimators/params.py": "follows the parameter's name and value in the error that quotes it",
    "ml/tuning.py: it is no list": "follows name and value in the error that quotes it",
    "core/spelling.py": "Python's own text, with a near name if there is one",
    "ml/scoring/task.py": "quotes an error of an input, which has value and fix",
    "ml/scoring/predict.py": "quotes an error of a parameter's type",
    "ml/estimators/estimator.py": "quotes an error of a parameter's type",
}


@dataclass(frozen=True)
class Text:
    """A text of an error: where it is, and the error's class and bases by name."""

    file: str
    line: int
    kinds: frozenset[str]
    text: str

    @property
    def excused(self) -> str:
        """The entry of the exceptions that this is; empty if it is none."""
        return next((e for e in EXCEPTIONS if f"{self.file}: {self.text}".startswith(e)), "")


def complaints(text: str, kinds: frozenset[str]) -> Iterator[str]:
    if not text.strip():
        yield "is empty"
    if re.search(r"\b(I|[Ww]e|[Oo]ur|us|[Mm]y)\b", text):
        yield "speaks in the first person"
    if re.search(r"\b(please|sorry)\b|!(?!=)", text, re.IGNORECASE):
        yield "pleads or exclaims"
    if re.match(r"(error|invalid|failed to)\b", text, re.IGNORECASE):
        yield "begins with what every error is"
    if re.search(r"(?<!\.)\.$", text):
        yield "ends with a full stop, which a text that quotes it would double"
    if kinds & REFUSALS and not VALUE.search(text):
        yield "names no value"
    if kinds & REFUSALS and not re.search(f"{RULE}|{FIX}", text, re.IGNORECASE):
        yield "gives neither a rule nor a fix"


def errors(root: Path) -> dict[str, frozenset[str]]:
    """Return the names of all errors, each with its own name and those of its bases."""
    classes = {
        node.name: [ast.unparse(base).rpartition(".")[2] for base in node.bases]
        for path in root.rglob("*.py")
        for node in _nodes(path)
        if isinstance(node, ast.ClassDef)
    }

    def line(name: str, below: frozenset[str] = frozenset()) -> frozenset[str]:
        below |= {name}
        return below.union(
            *(line(base, below) for base in classes.get(name, ()) if base not in below)
        )

    lines = {name: line(name) for name in (*PLAIN, *classes)}
    return {name: names for name, names in lines.items() if names & {*PLAIN, "SparkdlError"}}


def texts(root: Path = ROOT) -> Iterator[Text]:
    """Yield the texts of all errors that modules make, whether they raise or return them."""
    known, paths = errors(root), sorted(root.rglob("*.py"))
    everywhere = {
        name: values
        for path in paths
        for name, values in _assigned(ast.parse(path.read_text(encoding="utf-8")).body).items()
        if name.isupper()
    }
    for path in paths:
        functions = [n for n in _nodes(path) if isinstance(n, ast.FunctionDef)]
        for call in (n for n in _nodes(path) if isinstance(n, ast.Call) and n.args):
            kinds = known.get(ast.unparse(call.func).rpartition(".")[2])
            if kinds:
                around = [f for f in functions if f.lineno <= call.lineno <= (f.end_lineno or 0)]
                names = {**everywhere, **_assigned([n for f in around[-1:] for n in ast.walk(f)])}
                for text in _texts(call.args[-1], names):
                    yield Text(path.relative_to(root).as_posix(), call.lineno, kinds, text)


def _texts(node: ast.expr, names: Mapping[str, list[ast.expr]]) -> list[str]:
    """Return the texts that an expression can be; none if it has none of its own."""
    match node:
        case ast.Constant(value=str(text)):
            return [text]
        case ast.JoinedStr(values=parts):
            return ["".join(_part(part, names) for part in parts)]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            ends = _texts(right, names) or [HOLE]
            return [begin + end for begin in _texts(left, names) or [HOLE] for end in ends]
        case ast.IfExp(body=body, orelse=other):
            return _texts(body, names) + _texts(other, names)
        case ast.Name(id=name):
            others = {key: values for key, values in names.items() if key != name}
            return [text for value in names.get(name, ()) for text in _texts(value, others)]
    return []


def _part(node: ast.expr, names: Mapping[str, list[ast.expr]]) -> str:
    if not isinstance(node, ast.FormattedValue):
        return "".join(_texts(node, names))
    words = _texts(node.value, names) if isinstance(node.value, ast.Name) else []
    is_advice = re.search("advice|remedy|_INSTEAD", ast.unparse(node.value), re.IGNORECASE)
    return min(words, key=len) if words else ADVICE if is_advice else HOLE


def _assigned(nodes: list[ast.AST]) -> dict[str, list[ast.expr]]:
    found: dict[str, list[ast.expr]] = {}
    for node in nodes:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found.setdefault(node.targets[0].id, []).append(node.value)
    return found


@cache
def _nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def test_every_error_text_keeps_the_form() -> None:
    found = [
        f"{each.file}:{each.line} {complaint}: {each.text.replace(HOLE, '{…}')}"
        for each in texts()
        for complaint in complaints(each.text, each.kinds)
        if not (each.excused and complaint.startswith(UNEXCUSED_BY_FORM))
    ]
    assert not found, "\n".join(found)
