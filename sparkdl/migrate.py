"""`sparkdl migrate FILE…`: changes a program's imports of other libraries to those of sparkdl.

Runs in: driver

Positions come from `ast`, and the text is edited there: comments, strings and the format stay. A
program that was migrated has nothing left to change, so a second run does nothing. A name that
sparkdl lacks is an ImportError of the program, which says what to use.
"""

from __future__ import annotations

import ast
import difflib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

FACES = {
    "horovod": "sparkdl.horovod",
    "petastorm": "sparkdl.petastorm",
    "tensorflowonspark": "sparkdl.tfos",
}
"""Packages, and their replacements here."""
_CLASSES = {
    "pyspark.ml.deepspeed.deepspeed_distributor": "DeepspeedTorchDistributor",
    "pyspark.ml.torch.distributor": "TorchDistributor",
    "spark_tensorflow_distributor": "MirroredStrategyRunner",
    "spark_tensorflow_distributor.mirrored_strategy_runner": "MirroredStrategyRunner",
}
"""Modules, and the class of theirs that `sparkdl` has."""
_FROM = re.compile(rb"from\s+")
_MAGIC = re.compile(r"^([ \t]*)(?:[%!?]|\w(?=[\w.]*\?{1,2}[ \t]*$))", re.MULTILINE)
"""The first letter of a line that IPython alone reads: `%magic`, `!command`, `name?`."""
_OTHER_LANGUAGE = re.compile(r"\s*%%(?!capture|prun|time)")


@dataclass(frozen=True)
class Migrated:
    """A program after the change.

    Attributes:
        changes: how many names were replaced.
        warnings: what needs a look, by line.
    """

    text: str
    changes: int
    warnings: tuple[tuple[int, str], ...]


def migrated(text: str, outer: frozenset[str] = frozenset()) -> Migrated:
    """Return a program with the imports of sparkdl.

    Args:
        outer: packages that another cell of the notebook imports by their own name.

    Raises:
        SyntaxError: if it is no Python.
    """
    head = "\ufeff" if text.startswith("\ufeff") else ""
    # Bytes, because `ast` counts columns in bytes of UTF-8.
    lines = text[len(head) :].encode().splitlines(keepends=True)
    tree = ast.parse(b"".join(lines))
    edits, warnings = set(), set(_left(tree))
    for number, column, old, new in _found(tree, lines, imported_by_name(tree) | outer):
        if lines[number - 1].startswith(old.encode(), column):
            edits.add((number, column, old, new))
        else:  # on another line, or in an f-string: Python 3.11 has no positions inside it
            warnings.add((number, f"{old} is not changed here: write {new}"))
    # From the end, so that the positions before an edit stay right.
    for number, column, old, new in sorted(edits, reverse=True):
        line = lines[number - 1]
        lines[number - 1] = line[:column] + new.encode() + line[column + len(old.encode()) :]
    return Migrated(head + b"".join(lines).decode(), len(edits), tuple(sorted(warnings)))


def _found(
    tree: ast.AST, lines: list[bytes], bound: frozenset[str]
) -> Iterator[tuple[int, int, str, str]]:
    """Yield line and column (in bytes) of each name to replace, the name, and the new one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level and node.module:
            root = node.module.partition(".")[0]
            start = _FROM.match(lines[node.lineno - 1], node.col_offset)
            column = start.end() if start else node.col_offset
            if root in FACES:
                yield node.lineno, column, root, FACES[root]
            elif {alias.name for alias in node.names} == {_CLASSES.get(node.module)}:
                yield node.lineno, column, node.module, "sparkdl"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                root = alias.name.partition(".")[0]
                if root in FACES:
                    yield alias.lineno, alias.col_offset, root, FACES[root]
        elif isinstance(node, ast.Name) and node.id in bound:
            yield node.lineno, node.col_offset, node.id, FACES[node.id]


def _left(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and text of imports that the user has to change."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (name := _CLASSES.get(node.module or "")):
            if {alias.name for alias in node.names} != {name}:
                yield node.lineno, f"write `from sparkdl import {name}` in a line of its own"
        elif isinstance(node, ast.Import):
            names = {_CLASSES.get(alias.name) for alias in node.names} - {None}
            yield from ((node.lineno, f"write `from sparkdl import {name}`") for name in names)


def imported_by_name(tree: ast.AST) -> frozenset[str]:
    """Return the packages that are imported so that the program uses their own name."""
    imports = (node for node in ast.walk(tree) if isinstance(node, ast.Import))
    roots = (a.name.partition(".")[0] for node in imports for a in node.names if not a.asname)
    return frozenset(root for root in roots if root in FACES)


def migrated_notebook(text: str) -> Migrated:
    """Return a notebook whose cells of code import sparkdl; other cells are named, and stay.

    Raises:
        ValueError: if it is no notebook.
    """
    book = json.loads(text)
    cells = [cell for cell in book["cells"] if cell["cell_type"] == "code"]
    sources = ["".join(cell["source"]) for cell in cells]
    # Magics become comments of the same length, so that all positions stay.
    plain = [_MAGIC.sub(r"\1#", source) for source in sources]
    trees = [*map(_parsed, sources, plain)]
    outer = frozenset().union(*(imported_by_name(tree) for tree in trees if tree))
    changes, warnings = 0, list[tuple[int, str]]()
    for number, (cell, source, readable, tree) in enumerate(
        zip(cells, sources, plain, trees, strict=True), 1
    ):
        if tree is None:
            begins = next(iter(source.strip().splitlines()), "")
            warnings.append((1, f"cell {number} of code is not Python, and not changed: {begins}"))
            continue
        done = migrated(readable, outer)
        changes += done.changes
        warnings += [(line, f"cell {number} of code: {told}") for line, told in done.warnings]
        old, seen, new = (each.splitlines(True) for each in (source, readable, done.text))
        cell["source"] = [
            line if line != masked else changed
            for line, masked, changed in zip(old, seen, new, strict=True)
        ]
    if not changes:
        return Migrated(text, 0, tuple(warnings))
    return Migrated(json.dumps(book, indent=1, ensure_ascii=False) + "\n", changes, tuple(warnings))


def _parsed(source: str, readable: str) -> ast.AST | None:
    """Return the tree of a cell without its magics; `None` if it is no Python."""
    if _OTHER_LANGUAGE.match(source):
        return None
    try:
        return ast.parse(readable)
    except SyntaxError:
        return None


def migrate(paths: Iterable[Path], is_dry: bool) -> Iterator[str]:
    """Change files in place, each once; yield the lines to print.

    Args:
        is_dry: yield differences, and change nothing.
    """
    changes, files, seen = 0, 0, set[Path]()
    for path in (each for given in paths for each in _programs(given)):
        real = path.resolve()  # two links to one file are one file
        if real in seen:
            continue
        seen.add(real)
        try:
            text = real.read_bytes().decode()
            done = (migrated_notebook if path.suffix == ".ipynb" else migrated)(text)
        except (OSError, ValueError, KeyError, SyntaxError) as error:
            yield f"{path}: not changed: {type(error).__name__}: {error}"
            continue
        yield from (f"{path}:{line}: {told}" for line, told in done.warnings)
        if not done.changes:
            continue
        changes, files = changes + done.changes, files + 1
        if is_dry:
            pair = (text.splitlines(), done.text.splitlines())
            yield from difflib.unified_diff(*pair, str(path), str(path), lineterm="")
        else:
            real.write_bytes(done.text.encode())
            yield f"{path}: {done.changes} changes"
    yield f"{changes} changes in {files} of {len(seen)} files" + (" to make" if is_dry else "")


def _programs(given: Path) -> Iterable[Path]:
    if not given.is_dir():
        return [given]
    return sorted(p for kind in ("*.py", "*.ipynb") for p in given.rglob(kind) if p.is_file())
