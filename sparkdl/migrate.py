"""`sparkdl migrate FILE…`: changes a program's imports of other libraries to those of sparkdl.

Runs in: driver

Positions come from `ast`, and the text is edited there: comments, strings and the format stay. A
program that was migrated has nothing left to change, so a second run does nothing.
"""

from __future__ import annotations

import ast
import difflib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from sparkdl.core.links import docs_page
from sparkdl.core.namesakes import advise

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
_ORCA = f"BigDL Orca has no names here: {docs_page('migrating')} says what to write for each"
_PACKAGE = Path(__file__).parent
_FROM = re.compile(rb"from\s+")
_DOTTED = re.compile(rf"({'|'.join(FACES)})(\.\w+)+")
_SETTINGS = "petastorm.spark.converter."
"""Spark's settings for Petastorm's converter, which keep their names."""
_COMMAND = re.compile(r"\bhorovodrun\b|-m horovod\b")
_MAGIC = re.compile(r"^([ \t]*)(?:[%!?]|\w(?=[\w.]*\?{1,2}[ \t]*$))", re.MULTILINE)
"""The first letter of a line that IPython alone reads: `%magic`, `!command`, `name?`."""
_UNUSED = ". It is not used here: delete it"
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


class _Edit(NamedTuple):
    """A name to replace; `column` counts bytes."""

    line: int
    column: int
    old: str
    new: str


Warned = tuple[int, str]
"""A line, and what needs a look there."""


def migrated(
    text: str, outer: frozenset[str] = frozenset(), used: frozenset[str] = frozenset()
) -> Migrated:
    """Return a program with the imports of sparkdl.

    Args:
        outer: packages that another cell of the notebook imports by their own name.
        used: names that other cells use.

    Raises:
        SyntaxError: if it is no Python.
    """
    head = "\ufeff" if text.startswith("\ufeff") else ""
    # Bytes, because `ast` counts columns in bytes of UTF-8.
    lines = text[len(head) :].encode().splitlines(keepends=True)
    tree = ast.parse(b"".join(lines))
    bound = imported_by_name(tree) | outer
    used |= used_names(tree)
    found = [each for node in ast.walk(tree) for each in _found(node, lines, bound, used)]
    edits = {each for each in found if isinstance(each, _Edit)}
    warnings = {each for each in found if not isinstance(each, _Edit)}
    # From the end, so that the positions before an edit stay right.
    for number, column, old, new in sorted(edits, reverse=True):
        line = lines[number - 1]
        assert line[column:].startswith(old.encode()), (number, old)
        lines[number - 1] = line[:column] + new.encode() + line[column + len(old.encode()) :]
    return Migrated(head + b"".join(lines).decode(), len(edits), tuple(sorted(warnings)))


def _found(
    node: ast.AST, lines: Sequence[bytes], bound: frozenset[str], used: frozenset[str]
) -> Iterator[_Edit | Warned]:
    if isinstance(node, ast.ImportFrom) and not node.level:
        yield from _found_in_from(node, lines, used)
    elif isinstance(node, ast.Import):
        yield from _found_in_import(node, used)
    elif isinstance(node, ast.Name) and node.id in bound:
        place = lines[node.lineno - 1][node.col_offset :]
        if isinstance(node.ctx, ast.Load) and place.startswith(node.id.encode()):
            yield _Edit(node.lineno, node.col_offset, node.id, FACES[node.id])
        else:  # assigned to, or in an f-string: Python 3.11 has no positions inside it
            new = f"write {FACES[node.id]}, or give it another name"
            yield node.lineno, f"{node.id} is used here: {new}"
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield from ((node.lineno, told) for told in _of_text(node.value))


def _found_in_import(node: ast.Import, used: frozenset[str]) -> Iterator[_Edit | Warned]:
    for alias in node.names:
        root = alias.name.partition(".")[0]
        if root in FACES:
            yield _Edit(alias.lineno, alias.col_offset, root, FACES[root])
            for told in _missing(alias.name):
                yield alias.lineno, told + _if_unused(alias.asname or root, used)
        elif alias.name in _CLASSES:
            yield alias.lineno, f"write `from sparkdl import {_CLASSES[alias.name]}`"
        elif alias.name.startswith(("bigdl.orca", "zoo.orca")):
            yield alias.lineno, _ORCA


def _of_text(text: str) -> Iterator[str]:
    """Yield what to write for a string that names a module or a command of another library."""
    if _DOTTED.fullmatch(text) and not text.startswith(_SETTINGS):
        root, name, *_ = text.split(".")
        # Others may be the name of a file, such as horovod.log.
        if _has(root, name):
            yield f"the text {text!r} is not changed: write {_here(text)!r}"
        yield from _advised(_here(text))
    elif _COMMAND.search(text) and "\n" not in text:
        yield f"the text {text!r} is not changed: write `sparkdl run -np 2 python train.py`"


def _found_in_from(
    node: ast.ImportFrom, lines: Sequence[bytes], used: frozenset[str]
) -> Iterator[_Edit | Warned]:
    if parts := _split(node):
        old = lines[node.lineno - 1][node.col_offset : node.end_col_offset].decode()
        if node.lineno == node.end_lineno:
            yield _Edit(node.lineno, node.col_offset, old, "; ".join(parts))
        else:
            yield node.lineno, f"write two imports: {' and '.join(f'`{part}`' for part in parts)}"
        return
    start = _FROM.match(lines[node.lineno - 1], node.col_offset)
    for old, new in _of_module(node):
        if start is not None and lines[node.lineno - 1].startswith(old.encode(), start.end()):
            yield _Edit(node.lineno, start.end(), old, new)
        else:
            yield node.lineno, f"write `from {new} import …` in one line"
    yield from ((node.lineno, told) for told in _unknown(node, used))


def _split(node: ast.ImportFrom) -> list[str]:
    """Return the imports of names that come from sparkdl, and from where they came, if both are."""
    here = _CLASSES.get(node.module or "")
    ours = [ast.unparse(alias) for alias in node.names if alias.name == here]
    theirs = [ast.unparse(alias) for alias in node.names if alias.name not in (here, "*")]
    if not ours or not theirs or len(ours) + len(theirs) < len(node.names):
        return []
    pairs = (("sparkdl", ours), (node.module, theirs))
    return [f"from {module} import {', '.join(names)}" for module, names in pairs]


def used_names(tree: ast.AST) -> frozenset[str]:
    """Return the names that a program reads."""
    return frozenset(
        node.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    )


def _if_unused(name: str, used: frozenset[str]) -> str:
    return "" if name in used else _UNUSED


def imported_by_name(tree: ast.AST) -> frozenset[str]:
    """Return the packages that are imported so that the program uses their own name."""
    imports = (node for node in ast.walk(tree) if isinstance(node, ast.Import))
    roots = (a.name.partition(".")[0] for node in imports for a in node.names if not a.asname)
    return frozenset(root for root in roots if root in FACES)


def _of_module(node: ast.ImportFrom) -> Iterator[tuple[str, str]]:
    module = node.module or ""
    root = module.partition(".")[0]
    if root in FACES:
        yield root, FACES[root]
    elif {alias.name for alias in node.names} == {_CLASSES.get(module)}:
        yield module, "sparkdl"


def _unknown(node: ast.ImportFrom, used: frozenset[str]) -> Iterator[str]:
    module = node.module or ""
    if module.partition(".")[0] in FACES:
        names = {alias.asname or alias.name for alias in node.names}
        unused = "" if names & {*used, "*"} else _UNUSED
        yield from (told + unused for told in _missing(module))
        if _file(module) is None:
            return
        for alias in node.names:
            name = alias.name
            if name != "*" and not _has(module, name):
                told = f"{_here(module)} has no {name}"
                [why] = [*_advised(f"{_here(module)}.{name}")] or [told]
                yield why + _if_unused(alias.asname or name, used)
    elif module in _CLASSES and not list(_of_module(node)):
        yield f"{module}: sparkdl has {_CLASSES[module]} alone; import it in a line of its own"
    elif module.startswith(("bigdl.orca", "zoo.orca")):
        yield _ORCA
    elif module.partition(".")[0] == "sparkdl":
        yield from _of_a_namesake(module, [alias.name for alias in node.names])


def _of_a_namesake(module: str, names: Sequence[str]) -> Iterator[str]:
    """Yield what to use for names of another package that is imported as sparkdl."""
    folder = _PACKAGE.joinpath(*module.split(".")[1:])
    for name in names:
        if not (folder / name).is_dir() and not (folder / f"{name}.py").is_file():
            try:
                if module == "sparkdl" or not folder.with_suffix(".py").is_file():
                    advise(f"{module}.{name}")
            except ImportError as error:
                yield str(error)


def _names_in(path: Path) -> str:
    """Return the source of a module, and of the one that makes Horovod's callbacks for it."""
    source = path.read_text(encoding="utf-8")
    if "callback_named" in source:
        callbacks = _PACKAGE / "horovod" / "keras" / "callbacks.py"
        source += callbacks.read_text(encoding="utf-8")
    return source


def _has(module: str, name: str) -> bool:
    """Whether sparkdl's module that stands for another's has a module or a name."""
    path = _file(module)
    if path is None or _file(f"{module}.{name}"):
        return path is not None
    return re.search(rf"\b{name}\b", _names_in(path)) is not None


def _missing(module: str) -> Iterator[str]:
    if _file(module) is None:
        yield from [*_advised(_here(module))] or [f"there is no {_here(module)}"]


def _advised(name: str) -> Iterator[str]:
    """Yield what to use for a name that sparkdl lacks, if that is known."""
    try:
        advise(name)
    except ImportError as error:
        yield str(error)


def _here(module: str) -> str:
    root, dot, rest = module.partition(".")
    return FACES[root] + dot + rest


def _file(module: str) -> Path | None:
    """Return the file of sparkdl's module that stands for another's."""
    path = _PACKAGE.joinpath(*_here(module).split(".")[1:])
    found = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return found if found.is_file() else None


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
    used = frozenset().union(*(used_names(tree) for tree in trees if tree))
    changes, warnings = 0, list[Warned]()
    for number, (cell, source, readable, tree) in enumerate(
        zip(cells, sources, plain, trees, strict=True), 1
    ):
        if tree is None:
            begins = next(iter(source.strip().splitlines()), "")
            warnings.append((1, f"cell {number} of code is not Python, and not changed: {begins}"))
            continue
        done = migrated(readable, outer, used)
        changes += done.changes
        warnings += [(line, f"cell {number} of code: {told}") for line, told in done.warnings]
        if done.changes:
            pairs = zip(source.splitlines(True), readable.splitlines(True), strict=True)
            kept = [old if old != seen else None for old, seen in pairs]
            new = done.text.splitlines(True)
            cell["source"] = [old or line for old, line in zip(kept, new, strict=True)]
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
