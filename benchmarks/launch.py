"""How long until every node is inside the user's function, with its framework imported?

Runs sparkdl, its peers and the floor in turn, and prints medians; `README.md` has the method.
"""

from __future__ import annotations

from functools import partial

import runner

WAYS = {
    "floor, tensorflow": {"way": "floor", "framework": "tensorflow"},
    "sparkdl, tensorflow": {"way": "sparkdl", "framework": "tensorflow"},
    "TensorFlowOnSpark, TENSORFLOW": {"way": "tfos", "framework": "tensorflow"},
    "TensorFlowOnSpark, SPARK": {"way": "tfos", "framework": "tensorflow", "mode": "SPARK"},
    "floor, torch": {"way": "floor", "framework": "torch"},
    "sparkdl, torch": {"way": "sparkdl", "framework": "torch"},
    "TorchDistributor": {"way": "torch", "framework": "torch"},
}


def main() -> None:
    parser = runner.options(__doc__, deadline_s=180)
    parser.add_argument("--launches", type=int, default=2, help="launches in each session")
    parsed = parser.parse_args()
    contestants = runner.wanted(parsed, "launching.py", WAYS)
    given, shown = {"launches": parsed.launches}, ("launch", "entered_s")
    results = runner.in_turn(parsed, contestants, lambda *_: given, shown)
    figure = partial(runner.figure, results)
    first, later = slice(1), slice(1, None)
    rows = {}
    for one in contestants:
        launched = figure(one.name, *shown, first)
        floor = figure(f"floor, {one.arguments['framework']}", *shown, first)
        rows[one.name] = {
            "first launch": launched,
            "of floor": runner.ratio(launched, floor),
            "again": figure(one.name, *shown, later),
            "until down": figure(one.name, "launch", "down_s", first),
            "import": figure(one.name, "ready", "import_s"),
        }
    runner.report(parsed, {"seconds, median (min-max)": rows}, results)


if __name__ == "__main__":
    main()
