"""The Python blocks of the documentation, and which of them are run.

Runs in: the process of pytest

A block is run in the order of its page, in one process for each page, after
`preludes/common.py` and `preludes/<page>.py`, which define what the page takes for granted. One
that is not run says so on the line before it, unseen by readers: `<!-- not run: the reason -->`.
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PRELUDES = Path(__file__).parent / "preludes"
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))

_BLOCK = re.compile(
    r"^(?P<indent> *)```(?:python|py)\n(?P<code>.*?)^(?P=indent)```", re.MULTILINE | re.DOTALL
)
_NOT_RUN = re.compile(r"<!-- not run: (\S[^\n]*) -->\n *\Z")
_KNOWN = "import sparkdl\ndef _(cluster: sparkdl.Cluster, ctx): pass\n"
"""What pages do not say again; it takes the lines of a page's title."""


@dataclass(frozen=True)
class Block:
    """A block of Python.

    Attributes:
        line: of the page, on which its first line is.
        not_run: the reason why it is not run; empty if it is.
    """

    line: int
    code: str
    not_run: str = ""


def blocks_of(text: str) -> list[Block]:
    """Return the Python blocks of a page in their order."""
    found = []
    for match in _BLOCK.finditer(text):
        mark = _NOT_RUN.search(text, 0, match.start())
        line = text.count("\n", 0, match.start()) + 2
        found.append(Block(line, textwrap.dedent(match["code"]), mark[1] if mark else ""))
    return found


def as_read(blocks: list[Block]) -> str:
    """Return all blocks as one program, for `unknown_names`; lines are those of the page."""
    program = _KNOWN
    for block in blocks:
        program += "\n" * (block.line - 1 - program.count("\n")) + block.code
    return program


def as_run(page: Path) -> str:
    """Return the program that runs the blocks of a page; empty if there is none to run."""
    blocks = [block for block in blocks_of(page.read_text(encoding="utf-8")) if not block.not_run]
    if not blocks:
        return ""
    preludes = [path.read_text(encoding="utf-8") for path in preludes_of(page)]
    return "\n".join([*preludes, *(block.code for block in blocks)])


def preludes_of(page: Path) -> list[Path]:
    """Return the files that run before the blocks of a page."""
    own = PRELUDES / f"{page.stem.lower().replace('-', '_')}.py"
    return [PRELUDES / "common.py", *([own] if own.exists() else [])]
