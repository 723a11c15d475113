"""A checkpoint's parts: attempts at one task, functions told apart; without Spark."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparkdl.core.errors import CheckpointError, InferenceError
from sparkdl.ml.scoring import loaded
from sparkdl.ml.scoring.checkpoint import ScoreParts
from sparkdl.ml.scoring.columns import OutputColumn
from sparkdl.ml.scoring.identity import identity
from sparkdl.ml.scoring.inputs import InputColumn
from sparkdl.ml.scoring.source import ANY, Tensor, source_of_content
from sparkdl.ml.scoring.task import Score
from sparkdl.storage.systems import locate

SEEN: list[int] = []
BAD: set[int] = set()
ROWS = 50


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    yield
    SEEN.clear()
    BAD.clear()
    loaded._loaded.clear()


def fn(columns: dict[str, Any]) -> Any:
    module = sys.modules[__name__]
    if module.BAD & set(columns["x"].tolist()):
        raise KeyError("bad")
    module.SEEN.extend(columns["x"].tolist())
    return columns["x"] * 2


def attempt(folder: Path, **how: Any) -> list[dict[str, Any]]:
    """Score 50 rows in batches of 2, parts of 16; the key is x, one is null in 'n'."""
    source = source_of_content(cloudpickle.dumps((lambda: fn, ("y",))), "function")
    inputs = tuple(InputColumn(name, Tensor(name, ANY, None)) for name in ("x", "n"))
    outputs = (OutputColumn("y", "y", pa.int64(), "function"),)
    score = Score(source, "it", inputs, outputs, 2, **{"handle_invalid": "skip"} | how)
    task = ScoreParts(score, (0, 1), {"id": 0}, locate(str(folder))[0], str(folder))
    x = pa.array(range(ROWS), pa.int64())
    n = pa.array([None if i == 20 else "n" * (i * 7 % 5) for i in range(ROWS)], pa.string())
    batch = pa.RecordBatch.from_arrays([x, n], ["c0", "c1"])
    found = task(iter([batch.slice(0, 33), batch.slice(33)]))
    return [row for told in found for row in told.to_pylist()]


def test_attempts_leave_out_finished_parts_and_no_row_is_written_twice(tmp_path: Path) -> None:
    BAD.add(40)
    with pytest.raises(InferenceError, match="failed on rows 40 to 41"):
        attempt(tmp_path)
    first = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert len(first) == 2
    BAD.clear()
    attempt(tmp_path)
    assert [SEEN.count(i) for i in range(32)] == [i != 20 for i in range(32)]
    files = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert first.items() <= files.items()
    rows = [row for name in files for row in pq.read_table(tmp_path / name).to_pylist()]
    assert sorted(row["id"] for row in rows) == list(range(ROWS))
    assert all(row["y"] == (2 * row["id"] if row["id"] != 20 else None) for row in rows)
    assert [row["id"] for row in rows if row["__sparkdl_skipped"]] == [20]
    assert attempt(tmp_path) == []
    # One that began before the others had written replaces the files by the same rows.
    for number, how in enumerate(({}, {"group_by": 1})):
        other = tmp_path / str(number)
        other.mkdir()
        assert len(attempt(other, **how)) == len(files)
        for name in files:
            assert pq.read_table(other / name) == pq.read_table(tmp_path / name)


def test_folder_that_an_executor_does_not_have_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"cannot be written: .*All executors"):
        attempt(tmp_path / "missing")


def test_function_is_known_again_in_another_process_and_told_from_others(tmp_path: Path) -> None:
    code = """
import functools, logging
from sparkdl.ml.scoring.identity import identity
NAMES, VERSION, log = {"a", "b", "c"}, 1, logging.getLogger("it")
class Helper:
    def run(self, x):
        log.warning(x)
        return x in {"q", "w"} or (VERSION, NAMES)
helper = Helper()
helper.name = "x"
def make(path="p"):
    return lambda columns: [helper.run(y) for y in columns]
def again(n):
    return again(n - 1) if n else make
print(identity(functools.partial(make, path="q")), identity(again))
"""
    changes = {"": "", "\nclass": "\n\n# moved\nclass", '"x"': '"y"', '"w"': '"z"'}
    changes |= {"VERSION, log = {": "VERSION, log = {'d', ", 'h="q"': 'h="r"'}

    def told(number: int, change: tuple[str, str]) -> str:
        file = tmp_path / f"{number}.py"
        file.write_text(code.replace(*change) if change[0] else code)
        return subprocess.check_output([sys.executable, file], text=True)

    found = [told(number, change) for number, change in enumerate(changes.items())]
    assert found[0] == found[1]
    assert len({*found}) == len(found) - 1
    weights = [np.zeros(2000), np.zeros(2000)]
    weights[1][1000] = 1
    assert identity(partial(np.dot, weights[0])) != identity(partial(np.dot, weights[1]))
