"""How long does a user wait for a model, from the start of the program to scored test rows?

Runs the same training with sparkdl, its peers and one process without Spark in turn, and prints the
seconds of each phase; `README.md` has the method.
"""

from __future__ import annotations

from pathlib import Path

import datasets
import runner

WAYS = {
    "sparkdl, Keras": {"way": "sparkdl", "framework": "keras"},
    "sparkdl, Keras, files": {"way": "sparkdl", "framework": "keras", "files": True},
    "TensorFlowOnSpark, Keras": {"way": "tfos"},
    "one process, Keras": {"way": "alone", "framework": "keras"},
    "sparkdl, PyTorch": {"way": "sparkdl", "framework": "torch"},
    "sparkdl, PyTorch, files": {"way": "sparkdl", "framework": "torch", "files": True},
    "TorchDistributor, files": {"way": "torch"},
    "one process, PyTorch": {"way": "alone", "framework": "torch"},
}
PHASES = ("Spark", "launch", "first batch", "epochs", "save", "score", "shutdown")


def main() -> None:
    parser = runner.options(__doc__, deadline_s=1800)
    parser.add_argument("--rows", type=int, default=60_000, help="of the training data")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--data", type=Path, default=runner.ROOT / "out" / "data")
    parsed = parser.parse_args()
    contestants = runner.wanted(parsed, "jobs.py", WAYS)
    train, test = datasets.make_digits(parsed.data.resolve(), parsed.rows)
    given = {"train": train.path, "test": test.path, "rows": train.rows, "epochs": parsed.epochs}
    results = runner.in_turn(parsed, contestants, lambda *_: given, ("job", "total"))
    rows: dict[str, dict[str, runner.Cell]] = {}
    for one in contestants:
        rows[one.name] = {"total": runner.figure(results, one.name, "job", "total")}
        for column in (*PHASES, "CPU s", "GB", "accuracy"):
            found = runner.figure(results, one.name, "job", column)
            rows[one.name][column] = found and found.median
    print(f"{train.rows} rows, {parsed.epochs} epochs, {test.rows} test rows; two nodes.\n")
    runner.report(parsed, {"seconds, median (total: min-max)": rows}, results)


if __name__ == "__main__":
    main()
