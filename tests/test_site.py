"""The documentation as a site: it builds without a warning, and names all that is public."""

from __future__ import annotations

import sys

import pytest

import sparkdl
from scripts.site import REFERENCE, ROOT
from tests.doubles.programs import output_of

pytest.importorskip("mkdocs")


def test_every_public_name_is_in_the_reference() -> None:
    names = {name.rpartition(".")[2] for _, _, members in REFERENCE.values() for name in members}
    inside = {"NodeFailedError", "SparkdlError", "__version__"}
    assert set(sparkdl.__all__) - inside <= names


@pytest.mark.deep  # it takes ten seconds; tests/test_docs.py checks the pages
def test_it_is_built_without_a_warning() -> None:
    output_of(sys.executable, "-m", "scripts.site", cwd=ROOT)
    page = (ROOT / "build" / "site" / "reference" / "sparkdl.html").read_text(encoding="utf-8")
    assert "max_restarts" in page
