"""Parts of messages: short lists, links that lead to pages, near names of misspelt ones."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from sparkdl.core.errors import FeedTypeError
from sparkdl.core.texts import did_you_mean, docs_page, listed

ROOT = Path(__file__).parents[2]
SOURCES = {path: path.read_text("utf-8") for path in (ROOT / "sparkdl").rglob("*.py")}


def test_link_is_the_path_in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPARKDL_DOCS_URL", raising=False)
    assert docs_page("deployment") == "docs/deployment.md"
    assert docs_page("deployment", "claims") == "docs/deployment.md#claims"


@pytest.mark.parametrize("url", ["https://docs.example.org/0.1", "https://docs.example.org/0.1/"])
def test_docs_url_makes_it_the_address_on_that_site(
    monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    monkeypatch.setenv("SPARKDL_DOCS_URL", url)
    assert docs_page("deployment") == "https://docs.example.org/0.1/docs/deployment.html"
    note = "See https://docs.example.org/0.1/docs/troubleshooting.html#feedtypeerror"
    assert FeedTypeError("a dict").__notes__ == [note]


def test_pages_that_the_code_links_exist() -> None:
    names = {name for text in SOURCES.values() for name in re.findall(r'docs_page\("(.+?)"', text)}
    assert "deployment" in names
    assert not [name for name in names if not (ROOT / "docs" / f"{name}.md").exists()]


def test_texts_at_run_time_link_by_docs_page() -> None:
    found, page = [], re.compile(r"\bdocs/[\w-]+\.md")
    for path, text in SOURCES.items():
        if not page.search(text):
            continue
        tree = ast.parse(text)
        statements = {id(each.value) for each in ast.walk(tree) if isinstance(each, ast.Expr)}
        found += [
            f"{path.relative_to(ROOT)}:{each.lineno}"
            for each in ast.walk(tree)
            if isinstance(each, ast.Constant) and isinstance(each.value, str)
            if page.search(each.value) and id(each) not in statements
        ]
    assert not found, "docstrings may name the path, texts for users need a link"


def test_a_few_are_all_listed_and_of_many_the_first_and_a_count() -> None:
    assert listed([]) == ""
    assert listed([str(n) for n in range(10)]) == "0, 1, 2, 3, 4, 5, 6, 7, 8, 9"
    assert listed([f"worker:{n}" for n in range(1000)], "; ") == (
        "worker:0; worker:1; worker:2; worker:3; worker:4 and 995 more"
    )


KNOWN = ["batch_size", "epochs", "label_col", "features_col"]


@pytest.mark.parametrize(
    ("name", "meant"),
    [("batchSize", "batch_size"), ("epoch", "epochs"), ("lable_col", "label_col")],
)
def test_misspelt_name_finds_the_one_that_was_meant(name: str, meant: str) -> None:
    assert did_you_mean(name, KNOWN) == f"; did you mean {meant!r}?"


@pytest.mark.parametrize("name", ["gone", "x", ""])
def test_name_that_is_near_none_finds_nothing(name: str) -> None:
    assert did_you_mean(name, KNOWN) == ""
