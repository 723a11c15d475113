"""Misspelt names find what was meant; others find nothing."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from sparkdl.core.spelling import did_you_mean
from sparkdl.driver.handle import Cluster
from sparkdl.node.context import NodeContext

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


@pytest.mark.parametrize(
    ("method", "option", "meant"),
    [
        (Cluster.feed, "epoch", "epochs"),
        (Cluster.feed_async, "feeds", "feed"),
        (NodeContext.batches, "shuffles", "shuffle"),
    ],
)
def test_misspelt_option_of_a_feed_and_of_its_reader_is_named(
    method: Callable[..., Any], option: str, meant: str
) -> None:
    with pytest.raises(TypeError, match=rf"{option!r}; did you mean {meant!r}\?"):
        method(SimpleNamespace(ending=None), None, **{option: 1})
