"""Rows that each epoch deals anew over all nodes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from sparkdl.core.errors import ConfigError
from tests.doubles.labs import Lab
from tests.driver.feeds.test_parquet_integration import each_once, read_epochs, write

if TYPE_CHECKING:
    pass

EPOCHS = 3


@pytest.mark.parametrize(
    ("nodes", "passes"), [("roomy", 1), ("disk", 1), ("little", 3)], indirect=["nodes"]
)
def test_each_epoch_deals_each_row_once_and_reads_files_as_often_as_it_must(
    nodes: Lab, feed: str, tmp_path: Path, passes: int
) -> None:
    folder = write(tmp_path / "data", rows=300, width=200)  # 1 MB
    nodes.begin(read_epochs, (feed, EPOCHS))
    report = nodes.cluster.feed(folder, EPOCHS, feed, shuffle="global")
    assert (report.epochs, report.passes) == (EPOCHS, passes)
    assert report.rows_used == EPOCHS * 1200
    assert report.rows == {"worker:0": EPOCHS * 600, "worker:1": EPOCHS * 600}
    results = nodes.ended(feed)
    assert each_once(results, 1200)
    first, *others = ({*epoch} for epoch in results[0])
    for other in others:
        assert 30 < len(first & other) < 570, "half of the rows, in 32 blocks or more"


def test_shuffle_that_there_is_not_says_which_there_are(roomy: Lab, feed: str) -> None:
    with pytest.raises(ConfigError, match=r"shuffle=True must be 'global' or None.*ctx.batches"):
        roomy.cluster.feed([1], 1, feed, shuffle=True)  # type: ignore[arg-type]
