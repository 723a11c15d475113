"""Clusters that stay up for a file, by how much of a feed their nodes hold.

A body that `Lab.begin` runs reads the feed that the fixture `feed` names, so that each test has a
feed of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from sparkdl.core.options import Feeding
from tests.doubles.labs import Lab, lab

LITTLE = 1 << 16
"""Bytes of feed memory that make feeders wait."""


@pytest.fixture
def feed(request: pytest.FixtureRequest) -> str:
    """The name of the test's own feed."""
    name: str = request.node.name
    return name


def _lab(
    factory: pytest.TempPathFactory, name: str, nodes: int = 2, **options: Any
) -> Iterator[Lab]:
    with lab(factory.mktemp(name), "plain", nodes, **options) as made:
        yield made


@pytest.fixture(scope="module")
def roomy(run_name: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """Two nodes that hold whatever they are fed."""
    yield from _lab(tmp_path_factory, "roomy", feeding=Feeding(memory_nbytes=1 << 26))


@pytest.fixture(scope="module")
def little(run_name: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """Two nodes that hold 64 KiB; the rest has to wait."""
    yield from _lab(
        tmp_path_factory, "little", feeding=Feeding(memory_nbytes=LITTLE, disk_nbytes=0)
    )


@pytest.fixture(scope="module")
def disk(run_name: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """Two nodes that hold 64 KiB in memory, and the rest on disk."""
    yield from _lab(
        tmp_path_factory, "disk", feeding=Feeding(memory_nbytes=LITTLE, disk_nbytes=1 << 28)
    )


@pytest.fixture(scope="module")
def trio(run_name: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """Three nodes that hold whatever they are fed."""
    yield from _lab(tmp_path_factory, "trio", nodes=3, feeding=Feeding(memory_nbytes=1 << 26))


@pytest.fixture(scope="module")
def nodes(request: pytest.FixtureRequest) -> Lab:
    """One of the labs, which the test chooses by `indirect` parameters."""
    made: Lab = request.getfixturevalue(request.param)
    return made
