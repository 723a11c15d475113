"""How fast are TFRecord files read: sparkdl beside `tf.data.TFRecordDataset` and `parse_example`.

Runs each way in a process of its own, in turn, round after round, and prints rows/s and the ratio
to TensorFlow with as many threads. `README.md` says what is measured and why so.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import runner
from contestants.tfrecord_data import PIXELS, schema
from runner import Figure

from sparkdl.data.examples import columns_of, encode
from sparkdl.data.framing import frame

FILES = 4
ROWS = {"wide": 80_000, "scalars": 200_000, "texts": 40_000}
WAYS = (  # name, arguments, what it is compared with
    ("TensorFlow, 1 thread", ("tensorflow", 1), None),
    ("sparkdl, 1 process", ("sparkdl", 1), "TensorFlow, 1 thread"),
    ("TensorFlow, 2 threads", ("tensorflow", 2), None),
    ("sparkdl in Spark, 2 tasks", ("spark", 2), "TensorFlow, 2 threads"),
)


@dataclass(frozen=True)
class Run:
    """What came of reading one kind of data one way once; round 0 does not count."""

    contestant: str
    kind: str
    round: int
    load: float
    rows_per_s: float | None = None
    cpu_s_per_million: float | None = None
    error: str | None = None
    left_behind: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    kind: str
    contestant: str
    rows_per_s: Figure | None
    ratio: float | None
    cpu_s_per_million: Figure | None


def make(kind: str, folder: Path, rows: int) -> None:
    """Write random rows, the same in each run, to files of one size."""
    random = np.random.default_rng(0)
    folder.mkdir(parents=True)
    columns = schema(kind)
    for number in range(FILES):
        batch = pa.record_batch([_values(random, each, rows // FILES) for each in columns], columns)
        records = encode(batch, columns_of(columns))
        (folder / f"part-{number}.tfrecord").write_bytes(frame(records))


def _values(random: np.random.Generator, column: pa.Field, rows: int) -> pa.Array:
    if column.name == "x":
        values = pa.array(random.random(rows * PIXELS, np.float32))
        offsets = pa.array(np.arange(rows + 1, dtype=np.int32) * PIXELS)
        return pa.ListArray.from_arrays(offsets, values, type=column.type)
    if column.name == "words":
        words = [f"word{i}" for i in range(1000)]
        return pa.array(
            [random.choice(words, count).tolist() for count in random.integers(0, 20, rows)],
            column.type,
        )
    if column.name == "image":
        return pa.array([random.bytes(10_000) for _ in range(rows)], column.type)
    if pa.types.is_floating(column.type):
        return pa.array(random.random(rows, np.float32))
    return pa.array(random.integers(0, 1 << 20, rows))


def summarise(runs: Sequence[Run]) -> list[Row]:
    """Return the rows, with the ratio of medians to that of the way each is compared with."""
    counted = [run for run in runs if run.round]
    rows = []
    for kind in dict.fromkeys(run.kind for run in runs):
        of_kind = [run for run in counted if run.kind == kind]
        figures = {
            name: Figure.of(run.rows_per_s for run in of_kind if run.contestant == name)
            for name, *_ in WAYS
        }
        for name, _, other in WAYS:
            if name not in {run.contestant for run in runs}:
                continue
            ratio = runner.ratio(figures[name], figures[other]) if other else None
            used = Figure.of(run.cpu_s_per_million for run in of_kind if run.contestant == name)
            rows.append(Row(kind, name, figures[name], ratio, used))
    return rows


def main() -> None:
    """Run the rounds, print the table and write the JSON."""
    parser = runner.options(__doc__, "tfrecords", deadline_s=200)
    parser.add_argument("--rows", type=float, default=1.0, help="a factor on the rows")
    parser.add_argument("--kinds", default=",".join(ROWS), help="kinds of data")
    parser.set_defaults(python=sys.executable, repeats=3)
    parsed = parser.parse_args()
    runs = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-tfrecords-")))
        kinds = parsed.kinds.split(",")
        for kind in kinds:
            make(kind, folder / kind, int(ROWS[kind] * parsed.rows))
        for number in range(parsed.repeats + 1):
            for kind in kinds:
                for name, (how, threads), _ in WAYS:
                    if not parsed.only.search(name):
                        continue
                    arguments = [f"--how={how}", f"--threads={threads}", f"--kind={kind}"]
                    outcome = runner.run(
                        parsed.python,
                        "tfrecords.py",
                        [*arguments, f"--path={folder / kind}"],
                        parsed.deadline_s,
                    )
                    done = next(iter(outcome.events("done")), None)
                    speed = done and done["rows"] / done["seconds"]
                    used = done and done["cpu_s"] / done["rows"] * 1e6
                    runs.append(
                        Run(
                            name,
                            kind,
                            number,
                            outcome.load,
                            speed,
                            used,
                            outcome.error,
                            outcome.left_behind,
                        )
                    )
                    result = (
                        f"{speed:,.0f} rows/s, {used:.1f} CPU s per million"
                        if speed
                        else f"failed: {outcome.error}"
                    )
                    print(f"round {number}: {kind}: {name}: {result}", file=sys.stderr)
    rows = summarise(runs)
    lines = [
        [
            row.kind,
            row.contestant,
            row.rows_per_s.show(runner.thousands) if row.rows_per_s else "failed",
            None if row.ratio is None else f"{row.ratio:.2f}",
            row.cpu_s_per_million,
        ]
        for row in rows
    ]
    header = ["data", "median (min-max)", "rows/s", "of TensorFlow", "CPU s per million rows"]
    print(runner.markdown(header, lines))
    print("\n".join(runner.failures(runs)))
    runner.write_json(parsed.json, rows, runs, rows_factor=parsed.rows)


if __name__ == "__main__":
    main()
