"""Print the coverage of lines and of branches, by package, from what `coverage` has measured.

python scripts/coverage_by_package.py coverage.json
"""

from __future__ import annotations

import json
import sys
from collections import Counter, defaultdict
from pathlib import Path

KINDS = ("lines", "branches")


def main(report: Path) -> None:
    """Sum the files of `coverage json` up."""
    totals: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for name, measured in json.loads(report.read_text())["files"].items():
        package = ".".join(Path(name).parent.parts[:2])
        found = measured["summary"]
        for key in (package, "all"):
            totals[key] += Counter(
                {
                    "covered lines": found["covered_lines"],
                    "lines": found["num_statements"],
                    "covered branches": found["covered_branches"],
                    "branches": found["num_branches"],
                }
            )
    print(f"{'package':<28}{'lines':>8}{'branches':>10}")
    for package, counts in sorted(totals.items()):
        shares = (100 * counts[f"covered {kind}"] / (counts[kind] or 1) for kind in KINDS)
        print("{:<28}{:>6.1f} %{:>8.1f} %".format(package, *shares))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
