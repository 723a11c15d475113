"""Error texts keep one form: what happened, the value, the rule, the fix."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent / "sparkdl"
PLAIN = (
    *("ValueError", "TypeError", "KeyError", "RuntimeError", "TimeoutError", "OSError"),
    *("ImportError", "FileNotFoundError"),
)
REFUSALS = {"ConfigError", "ValueError", "TypeError"}  # the caller gave what cannot work
HOLE = "\N{REPLACEMENT CHARACTER}"  # stands for a formatted value
VALUE = rf"{HOLE}|\w=|\w…?\(|--\w|\b[a-z]+_[a-z_]+\b|\b[A-Z]\w*[a-z][A-Z]"  # or what a program says
RULE = (
    r"\b(must|needs?|ha(s|ve) to|cannot|can't|can (only )?be|only|takes?|unexpected|instead|"
    r"already|one of|either|neither|at (least|most)|or (more|later|newer)|above|all but)\b|"
    rf"advice\b|\b((its|the|'s) columns|outputs|queues|it) (are|has|have|is) {HOLE}"
)
FIXES = (
    "add|ask|build|call|cast|change|choose|convert|declare|define|delete|detach|drop|export|"
    f"feed(?! *{HOLE})|fill|flatten|give|import|index|install|iterate|join|launch|leave|load|lower|"
    "make|name|order|pass|pip install|profile|put|raise|reduce|register|remove|rename|repair|"
    "replace|return|rewrite|run|save|scale|set|split|start|step|synchronize|train|unset|use|wrap|"
    "write"
)
FIX = rf"(^|[.:;,({HOLE}] |\b(or|and|to|then) )({FIXES})\b"  # where a clause begins

QUOTED = "says why nodes do not read a DataFrame; the error that quotes it has the fix"
EXCEPTIONS = {  # files, and beginnings of texts in them, that need neither value nor fix: why
    "driver/executors/parquet_scan.py": QUOTED,
    "storage/parquet/scan.py": QUOTED,
    "control/messages.py": "quoted in the ProtocolError about the message",
    "control/values.py": "quoted in the ProtocolError about the result",
    "values/ndarrays.py": "quoted in the FeedTypeError that names column and rule",
    "ml/params.py": "follows the parameter's name and value in the error that quotes it",
    "ml/scoring/task.py": "quotes an error of an input, which has value and fix",
    "ml/scoring/predict.py": "quotes an error of a parameter's type",
    "ml/estimators/estimator.py": "quotes an error of a parameter's type",
    "node/link.py: this node cannot": "the constant that it quotes names what is exhausted",
}


class Text(NamedTuple):
    place: str
    kinds: frozenset[str]  # the error's class and its bases
    text: str
    excuse: str  # its entry in the exceptions


def complaints(each: Text) -> Iterator[str]:
    text, is_refusal = each.text, bool(each.kinds & REFUSALS) and not each.excuse
    rules = {
        "is empty": not text.strip(),
        "speaks in the first person": re.search(r"\b(I|[Ww]e|[Oo]ur|us|[Mm]y)\b", text),
        "pleads or exclaims": re.search(r"\b(please|sorry)\b|!(?!=)", text, re.IGNORECASE),
        "begins as all errors could": re.match(r"(error|invalid|failed to)\b", text, re.IGNORECASE),
        "ends with a full stop, which a text that quotes it doubles": re.search(r"[^.]\.$", text),
        "names no value": is_refusal and not re.search(VALUE, text),
        "has neither rule nor fix": is_refusal and not re.search(f"{RULE}|{FIX}", text, re.I),
    }
    yield from (f"{each.place} {rule}: {text}" for rule, is_broken in rules.items() if is_broken)


def texts(root: Path = ROOT) -> Iterator[Text]:
    """Yield the texts of all errors that modules make, whether they raise or return them."""
    modules = {path.relative_to(root).as_posix(): _nodes(path) for path in root.rglob("*.py")}
    everything = (node for nodes in modules.values() for node in nodes)
    errors = _errors([node for node in everything if isinstance(node, ast.ClassDef)])
    tops = [_assigned(nodes) for nodes in modules.values()]
    constants = {name: values for top in tops for name, values in top.items() if name.isupper()}
    for file, nodes in modules.items():
        functions = [n for n in nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
        for call in (n for n in nodes if isinstance(n, ast.Call) and n.args):
            if kinds := errors.get(_last_name(call.func)):
                around = [f for f in functions if f.lineno <= call.lineno <= (f.end_lineno or 0)]
                names = constants | _assigned([n for f in around[-1:] for n in ast.walk(f)])
                for text in _texts(call.args[-1], names):
                    excuse = next((e for e in EXCEPTIONS if f"{file}: {text}".startswith(e)), "")
                    yield Text(f"{file}:{call.lineno}", kinds, text, excuse)


def _errors(classes: list[ast.ClassDef]) -> dict[str, frozenset[str]]:
    bases = {each.name: [_last_name(base) for base in each.bases] for each in classes}

    def line(name: str, below: frozenset[str]) -> frozenset[str]:
        below |= {name}
        return below.union(*(line(b, below) for b in bases.get(name, ()) if b not in below))

    lines = {name: line(name, frozenset()) for name in (*PLAIN, *bases)}
    return {name: names for name, names in lines.items() if names & {*PLAIN, "SparkdlError"}}


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
    return min(words, key=len) if words else f"{HOLE}advice" if is_advice else HOLE


def _assigned(nodes: list[ast.AST]) -> dict[str, list[ast.expr]]:
    found: dict[str, list[ast.expr]] = {}
    for node in nodes:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found.setdefault(node.targets[0].id, []).append(node.value)
    return found


def _last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


@cache
def _nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def test_every_error_keeps_the_form() -> None:
    found = list(texts())
    assert len(found) > 600, "hardly any text was found"
    wrong = [complaint for each in found for complaint in complaints(each)]
    assert not wrong, "\n".join(wrong)
    assert not set(EXCEPTIONS) - {each.excuse for each in found}, "exceptions that except nothing"
