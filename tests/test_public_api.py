"""The public names, their parameters and defaults are those of `tests/public_api.txt`."""

from __future__ import annotations

from scripts.public_api import PATH, api


def test_public_names_parameters_and_defaults_are_those_that_are_written_down() -> None:
    written = PATH.read_text(encoding="utf-8")
    assert api() == written, "after `python -m scripts.public_api` the diff shows what is different"
