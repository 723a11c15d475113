"""The Python blocks of the documentation, and which of them are run.

A block is run in the order of its page, in one process for each page, after
`preludes/common.py` and `preludes/<page>.py`, which define what the page takes for granted. A line
`# block: <heading>` of these stands for the next block under that heading, so that something can
come before or after it, or it can be the body of a function; blocks without such a line come last.
One that is not run says so on the line before it, unseen by readers:
`<!-- not run: the reason -->`.
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PRELUDES = Path(__file__).parent / "preludes"
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))

_HEADING_OR_BLOCK = re.compile(
    r"^#+ (?P<heading>[^\n]+)$"
    r"|^(?P<indent> *)```(?P<language>\w*)\n(?P<code>.*?)^(?P=indent)```",
    re.MULTILINE | re.DOTALL,
)
_PLACE = re.compile(r"^(?P<indent> *)# block: (?P<heading>.+)$", re.MULTILINE)
_NOT_RUN = re.compile(r"<!-- not run: (\S[^\n]*) -->\n *\Z")
_KNOWN = "import sparkdl\ndef _(cluster: sparkdl.Cluster, ctx): pass\n"
"""What pages do not say again; it takes the lines of a page's title."""


@dataclass(frozen=True)
class Block:
    """A block of Python.

    Attributes:
        line: of the page, on which its first line is.
        heading: the last one before it.
        not_run: the reason why it is not run; empty if it is.
    """

    line: int
    heading: str
    code: str
    not_run: str = ""


def blocks_of(text: str) -> list[Block]:
    """Return the Python blocks of a page in their order."""
    found = []
    heading = ""
    for match in _HEADING_OR_BLOCK.finditer(text):
        heading = match["heading"] or heading
        if match["language"] in ("python", "py"):
            mark = _NOT_RUN.search(text, 0, match.start())
            line = text.count("\n", 0, match.start()) + 2
            code = textwrap.dedent(match["code"])
            found.append(Block(line, heading, code, mark[1] if mark else ""))
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
    try:
        return in_places("\n".join(preludes), blocks)
    except LookupError as error:
        raise LookupError(f"{page.name}: {error}") from None


def in_places(prelude: str, blocks: list[Block]) -> str:
    """Return `prelude` with blocks where it asks for them, and the others behind it.

    Raises:
        LookupError: it asks for more blocks than there are under a heading.
    """
    waiting = list(blocks)

    def put(place: re.Match[str]) -> str:
        for block in waiting:
            if block.heading == place["heading"]:
                waiting.remove(block)
                return textwrap.indent(block.code, place["indent"])
        raise LookupError(f"no further block that is run is under {place['heading']!r}")

    program = _PLACE.sub(put, prelude)
    return "\n".join([program, *(block.code for block in waiting)])


def preludes_of(page: Path) -> list[Path]:
    """Return the files that run before the blocks of a page."""
    own = PRELUDES / f"{page.stem.lower().replace('-', '_')}.py"
    return [PRELUDES / "common.py", *([own] if own.exists() else [])]
