"""The public names, their parameters and defaults are those of `tests/public_api.txt`."""

from __future__ import annotations

from operator import attrgetter

import sparkdl
from scripts.generate import API, api


def test_public_names_parameters_and_defaults_are_those_that_are_written_down() -> None:
    written = API.read_text(encoding="utf-8")
    assert api() == written, "after `python -m scripts.generate` the diff shows what is different"


def test_public_names_have_docstrings() -> None:
    lines = API.read_text(encoding="utf-8").splitlines()
    names = [each.partition("(")[0] for each in lines if each[0] != " " and ": " not in each]
    members = {each: attrgetter(each)(sparkdl) for each in names}
    assert len(members) > 100
    assert [name for name, it in members.items() if callable(it) and not it.__doc__] == []
