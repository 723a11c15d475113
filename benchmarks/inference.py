"""How many rows per second does `transform` score, on the CPU? With `--model`: does `predict`?

Runs sparkdl, Spark's `predict_batch_udf`, TensorFlowOnSpark's `TFModel` and one process without
Spark in turn, and prints medians; `README.md` has the method.
"""

from __future__ import annotations

import argparse
import subprocess
from pathlib import Path

import datasets
import runner

LIMIT, UDF = "limit: one process, Parquet and predict_on_batch", "predict_batch_udf"
TFOS = "TensorFlowOnSpark 2.2.5 TFModel"
WAYS = {
    LIMIT: {"way": "limit"},
    "sparkdl TFModel, scores used": {"way": "sparkdl"},
    "sparkdl TFModel, all columns used": {"way": "kept"},
    UDF: {"way": "udf"},
    TFOS: {"way": "tfos"},
}


def texts(parsed: argparse.Namespace) -> None:
    """Compare ways to embed sentences with the model in `--model`, and to continue them."""
    ways = {"embeddings": {"generates": False}, "16 new tokens": {"generates": True}}
    contestants = runner.wanted(parsed, "texts.py", ways)
    with runner.data_folder(parsed.data) as folder:
        data, _ = datasets.make("texts", folder, parsed.rows)
        given = {"passes": parsed.passes, "batch": parsed.batch, "model": str(parsed.model)}
        results = runner.in_turn(
            parsed, contestants, lambda *_: vars(data) | given, ("limit: one process", "rows/s")
        )
    tables = {}
    for one in contestants:
        found = [r["event"] for each in results if each.contestant == one for r in each.records]
        keys = ("rows/s", "CPU ms per row")
        figures = {
            way: {key: runner.figure(results, one.name, way, key) for key in keys}
            for way in dict.fromkeys(found)
        }
        rate = {way: each["rows/s"] for way, each in figures.items()}
        tables[f"{one.name}, median (min-max)"] = {
            way: {**each, "of limit": runner.ratio(rate[way], next(iter(rate.values())))}
            for way, each in figures.items()
        }
    runner.report(parsed, tables, results, data=data)


def main() -> None:
    parser = runner.options(__doc__, deadline_s=300)
    add = parser.add_argument
    add("--rows", type=float, default=2, help="factor for 160,000 rows, or 384 texts")
    add("--passes", type=int, default=2, help="passes of a contestant that count")
    add("--batch", type=int, default=1024, help="rows in a batch of the model")
    add("--data", type=Path, help="folder that keeps data and model; default: a temporary one")
    add(
        "--model", type=Path, help="folder of all-MiniLM-L6-v2: compare ways to score texts with it"
    )
    parsed = parser.parse_args()
    if parsed.model:
        texts(parsed)
        return
    contestants = runner.wanted(parsed, "scoring.py", WAYS)
    with runner.data_folder(parsed.data) as folder:
        data, few = datasets.make("wide", folder, parsed.rows)
        code = "import scoring, pathlib, sys; scoring.make_model(pathlib.Path(sys.argv[1]))"
        programs = runner.HERE / "contestants"
        subprocess.run([parsed.python, "-c", code, str(folder)], cwd=programs, check=True)
        given = {"passes": parsed.passes, "batch": parsed.batch, "model": str(folder)}
        results = runner.in_turn(
            parsed,
            contestants,
            lambda one, _: vars(few if one.name == TFOS else data) | given,
            ("pass", "rows/s"),
        )
    rate = {name: runner.figure(results, name, "pass", "rows/s") for name in WAYS}
    cpu = "CPU s per million rows"
    rows = {
        one.name: {
            "rows/s": rate[one.name],
            "of limit": runner.ratio(rate[one.name], rate[LIMIT]),
            "of predict_batch_udf": runner.ratio(rate[one.name], rate[UDF]),
            cpu: runner.figure(results, one.name, "pass", cpu),
        }
        for one in contestants
    }
    runner.report(parsed, {"median (min-max)": rows}, results, data=data, few=few)


if __name__ == "__main__":
    main()
