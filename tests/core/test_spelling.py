"""Misspelt names find what was meant; others find nothing."""

from __future__ import annotations

import pytest

from sparkdl.core.spelling import did_you_mean

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
