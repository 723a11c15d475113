"""What grows with the number of nodes, and what does not?

`control`: the driver, with simulated agents. `nodes`: plain nodes as processes of this machine.
`model`: a trained model's file, of that many MB, on its way from an agent.
`README.md` has the method.
"""

from __future__ import annotations

import sys

import runner
from runner import Contestant

SIZES = {"control": (10, 50, 200), "nodes": (2, 16, 64, 128), "model": (1000,)}


def main() -> None:
    parser = runner.options(__doc__, deadline_s=600, repeats=1, warm_up=0)
    parser.set_defaults(python=sys.executable)
    add = parser.add_argument
    add("--sections", default=",".join(SIZES), help="comma-separated sections")
    add("--nodes", help="comma-separated node counts for all sections")
    add("--seconds", type=float, default=15.0, help="for each load of `control`")
    parsed = parser.parse_args()
    contestants = [
        Contestant(
            f"{section}, {nodes} {'MB' if section == 'model' else 'nodes'}",
            *("scaling.py", {"way": section, "nodes": nodes}),
        )
        for section in parsed.sections.split(",")
        for nodes in (map(int, parsed.nodes.split(",")) if parsed.nodes else SIZES[section])
    ]
    given = {"seconds": parsed.seconds}
    results = runner.in_turn(parsed, contestants, lambda *_: given, ("figures", "gathered, s"))
    tables: dict[str, dict[str, dict[str, runner.Cell]]] = {}
    for one in contestants:
        mine = [record for done in results if done.contestant == one for record in done.records]
        rows = tables.setdefault(f"{one.arguments['way']}, medians", {})
        columns = [column for column in mine[0] if column != "event"] if mine else []
        found = {of: runner.figure(results, one.name, "figures", of) for of in columns}
        rows[one.name] = {column: figure and figure.median for column, figure in found.items()}
    runner.report(parsed, tables, results)


if __name__ == "__main__":
    main()
