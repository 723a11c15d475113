"""The documentation keeps its promises: links lead somewhere, Python is Python, names exist."""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

from scripts.generate import DESIGN, with_diagrams
from sparkdl.core import errors
from sparkdl.core.errors import SparkdlError
from sparkdl.core.failure import Code

ROOT = Path(__file__).parent.parent

_FENCE = re.compile(r"^( *)(```+|~~~+) *(\w*)[^\n]*\n(.*?)^\1\2", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(<?([^)\s>]+)>?(?: \"[^\"]*\")?\)|(?:src|href)=\"([^\"]+)\"")
_HEADING = re.compile(r"^#{1,6} +(.+?) *#*$", re.MULTILINE)
_ANCHOR = re.compile(r"<a (?:name|id)=\"([^\"]+)\"")
_CODE = re.compile(r"`([^`\n]+)`")
_DOTTED = re.compile(r"\bsparkdl(?:\.[A-Za-z_]\w*)+")
_FILE = re.compile(r"(?:[\w.-]+/)+[\w-]+\.(?:py|ipynb)")

MAX_COLUMNS = 120
MAX_FILES_OF_A_ROW = 25
MAX_README_LINES = 110
STILL_WIDE = ("tests/faults/README.md",)  # to be wrapped


def pages(root: Path = ROOT) -> list[Path]:
    """Return every Markdown file once, but none in hidden or generated folders."""
    found: list[Path] = []
    for folder, folders, files in os.walk(root):
        folders[:] = [f for f in folders if f[0] != "." and f not in ("out", "build", "dist")]
        found += [Path(folder, file) for file in files if file.endswith(".md")]
    return sorted(page for page in found if not page.is_symlink())


def broken_links(page: Path) -> Iterator[str]:
    text = page.read_text(encoding="utf-8")
    for match in _LINK.finditer(re.sub(r"`[^`\n]*`", "", _FENCE.sub("", text))):
        link = unquote(match.group(1) or match.group(2))
        if re.match(r"[a-z][a-z0-9+.-]*:", link):
            continue  # another site's
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        if not target.exists():
            yield f"{page.name}: {link} leads nowhere; {target} does not exist"
        elif anchor and target.suffix == ".md" and anchor not in anchors(target):
            yield f"{page.name}: {link} leads nowhere; {target.name} has no such heading"


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives a page's headings, and those written out."""
    text = page.read_text(encoding="utf-8")
    slugs: dict[str, int] = {}
    found = set(_ANCHOR.findall(text))
    for heading in _HEADING.findall(_FENCE.sub("", text)):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        count = slugs[slug] = slugs.get(slug, -1) + 1
        found.add(f"{slug}-{count}" if count else slug)
    return found


def wrong_snippets(page: Path) -> Iterator[str]:
    text = page.read_text(encoding="utf-8")
    for match in _FENCE.finditer(text):
        if match.group(3) not in ("python", "py"):
            continue
        line = text.count("\n", 0, match.start()) + 2
        try:
            compile(textwrap.dedent(match.group(4)), page.name, "exec", dont_inherit=True)
        except SyntaxError as error:
            yield f"{page.name}:{line + (error.lineno or 1) - 1} is no Python: {error.msg}"


def wide_lines(page: Path) -> Iterator[str]:
    """Yield lines that are too long, but for what cannot be wrapped: rows of tables, addresses."""
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        is_table = line.lstrip().startswith("|") and page.resolve() != ROOT / "README.md"
        columns = len(re.sub(r"https?://\S+", "", line))
        if columns > MAX_COLUMNS and not is_table:
            yield f"{page.name}:{number} has {columns} columns, {MAX_COLUMNS} are allowed"


def unknown_names(page: Path) -> Iterator[str]:
    """Yield names of sparkdl's modules, and of files here, that a page mentions and nobody has."""
    text = page.read_text(encoding="utf-8")
    inline = "\n".join(_CODE.findall(_FENCE.sub("", text)))
    code = [m.group(4) for m in _FENCE.finditer(text) if m.group(3) in ("python", "py")]
    for name in sorted(set(_DOTTED.findall("\n".join([inline, *code])))):
        if not _is_known(name.split(".")):
            yield f"{page.name}: there is no {name}"
    roots = (ROOT, ROOT / "sparkdl", ROOT / "tests", page.parent)
    for file in sorted(set(_FILE.findall(inline))):
        if not any((root / file).exists() for root in roots):
            yield f"{page.name}: there is no file {file}"


def _is_known(parts: list[str]) -> bool:
    """Whether the longest module in `parts` mentions the name that follows it."""
    for count in range(len(parts), 0, -1):
        module = ROOT.joinpath(*parts[:count])
        file = module / "__init__.py" if module.is_dir() else module.with_suffix(".py")
        if file.exists():
            following, text = parts[count : count + 1], file.read_text()
            for home in re.findall(r"^from sparkdl\.core\.(\w+) import \*", text, re.MULTILINE):
                text += (ROOT / "sparkdl" / "core" / f"{home}.py").read_text()
            return not following or re.search(rf"\b{following[0]}\b", text) is not None
    return False


def test_links_lead_somewhere() -> None:
    assert not [wrong for page in pages() for wrong in broken_links(page)]


def test_python_snippets_compile() -> None:
    assert not [wrong for page in pages() for wrong in wrong_snippets(page)]


def test_diagrams_of_the_state_machines_are_those_of_the_tables() -> None:
    page = DESIGN.read_text(encoding="utf-8")
    assert page == with_diagrams(page), "draw them again: python -m scripts.generate"


def test_way_of_a_row_is_a_few_files_each_once() -> None:
    way = DESIGN.read_text(encoding="utf-8").partition("**The way of a row**")[2].split("```")[1]
    files, folder = list[str](), ""
    for start, names, end in re.findall(r"([\w/]*)(?:\{([\w,]+)\})?(\w*\.py)", way):
        for name in names.split(","):
            path = f"{start}{name}{end}"
            folder = path.rpartition("/")[0] or folder
            files.append(f"{folder}/{path.rpartition('/')[2]}")
    assert [file for file in files if not (ROOT / "sparkdl" / file).exists()] == []
    assert len(files) == len(set(files)) <= MAX_FILES_OF_A_ROW


def test_lines_can_be_read_without_scrolling() -> None:
    narrow = [page for page in pages() if page.relative_to(ROOT).as_posix() not in STILL_WIDE]
    assert not [wide for page in narrow for wide in wide_lines(page)]


def test_names_of_modules_and_files_exist() -> None:
    assert not [unknown for page in pages() for unknown in unknown_names(page)]


def test_readme_is_read_in_two_minutes() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= MAX_README_LINES


def test_first_program_of_the_readme_is_short() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8").partition("## The first program")[2]
    assert len(re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0].splitlines()) <= 40


def test_nobody_is_sent_to_a_package_index_that_has_no_sparkdl() -> None:
    """Before the package is published, an extra is installed from a clone, or by what it needs."""
    sources = [*pages(), *(ROOT / "sparkdl").rglob("*.py"), *(ROOT / "notebooks").glob("*.ipynb")]
    commands = re.compile(r"install [^`\n]*sparkdl-cluster\[|pip install [^`\n]*sparkdl-cluster")
    assert not [path for path in sources if commands.search(path.read_text(encoding="utf-8"))]


def test_navigation_of_the_site_has_every_page_once() -> None:
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    listed = re.findall(r": docs/([\w-]+\.md)$", nav, re.MULTILINE)
    assert sorted(listed) == sorted(page.name for page in (ROOT / "docs").glob("*.md"))


def test_every_error_and_code_has_a_section_and_errors_link_to_it() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    classes = [each for each in vars(errors).values() if isinstance(each, type)]
    classes = [each for each in classes if issubclass(each, SparkdlError) and each != SparkdlError]
    names = [*(each.__name__ for each in classes), *(each.value for each in Code)]
    assert sorted(_ANCHOR.findall(page)) == sorted(name.lower() for name in names)
    for each in classes:
        file, _, anchor = errors.page_of(each).partition("#")
        assert anchor in anchors(ROOT / file)
