"""How soon does training resume after a kill, and when does the driver report the failure?

Runs sparkdl, its peers and the floors in turn, and prints medians; `README.md` has the method.
"""

from __future__ import annotations

import re
from collections import Counter
from functools import partial

import runner
from runner import Contestant

FLOOR, EXECUTOR = "floor: import", "floor: Spark replaces an executor"
TFOS = "TensorFlowOnSpark: child"
WAYS = {
    f"{FLOOR} tensorflow": {"way": "import"},
    "sparkdl, tensorflow: child": {"way": "sparkdl"},
    f"{FLOOR} torch": {"way": "import", "framework": "torch"},
    "sparkdl, torch: child": {"way": "sparkdl", "framework": "torch"},
    "TorchDistributor: child": {"way": "torch", "framework": "torch"},
    EXECUTOR: {"way": "executor", "victim": "executor"},
    "sparkdl, tensorflow: executor": {"way": "sparkdl", "victim": "executor"},
    TFOS: {"way": "tfos", "kills": 1},  # its only end is a long timeout
}
HOLDS = {f"ctx.checkpoint{end}": {"way": "hold", "beside": bool(end)} for end in ("", "_async")}
HELD = "seconds that a checkpoint holds up a step, median (min-max)"


def floor_of(one: Contestant) -> str:
    is_executor = one.arguments.get("victim") == "executor"
    return EXECUTOR if is_executor else f"{FLOOR} {one.arguments.get('framework', 'tensorflow')}"


def main() -> None:
    parser = runner.options(__doc__, deadline_s=600, repeats=2, warm_up=0)
    add = parser.add_argument
    add("--kills", type=int, default=5, help="kills in each session, after one to warm up")
    add("--after-s", type=float, default=12.0, help="seconds of training before each kill")
    parsed = parser.parse_args()
    asked, holds = (runner.wanted(parsed, "recovering.py", ways) for ways in (WAYS, HOLDS))
    floors = {floor_of(one) for one in asked}
    parsed.only = re.compile("|".join({*(re.escape(one.name) for one in asked), *floors}) or "(?!)")
    contestants = runner.wanted(parsed, "recovering.py", WAYS)
    given = {"kills": 1 + parsed.kills, "after_s": parsed.after_s}
    results = runner.in_turn(parsed, contestants + holds, lambda *_: given, ("recovery", "back_s"))
    rows, said = {}, Counter[tuple[str, str]]()
    for one in contestants:
        counted = slice(0 if one.name == TFOS else 1, None)  # the first kill warms up
        figure = partial(runner.figure, results, event="recovery", which=counted)
        back, floor = figure(one.name, key="back_s"), figure(floor_of(one), key="back_s")
        kills = [kill for of in results if of.contestant == one for kill in of.records[counted]]
        said.update((one.name, kill["said"]) for kill in kills if "said" in kill)
        rows[one.name] = {
            "kills": len(kills),
            "driver knows": figure(one.name, key="known_s"),
            "all back": back,
            "beyond the floor": f"{back.median - floor.median:+.2f}" if back and floor else None,
            "all have stepped": figure(one.name, key="step_s"),
        }
    held = {o.name: {"1 GB": runner.figure(results, o.name, "hold", "held_s")} for o in holds}
    runner.report(parsed, {"seconds since the kill, median (min-max)": rows, HELD: held}, results)
    for (name, text), count in said.items():
        print(f"{name} reported, {count} times: {text}")


if __name__ == "__main__":
    main()
