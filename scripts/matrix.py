"""Run tests with other versions of Spark, Python, TensorFlow and PyTorch; print one table.

    python -m scripts.matrix                 all rows
    python -m scripts.matrix 3.5-3.10        one
    python -m scripts.matrix --table         what the last runs of all rows found

Each row has a virtual environment in `build/matrix`, which is kept, and `build/matrix/<row>.log`.
A row whose Python is not there is left out. `docs/deployment.md` holds the table.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "build" / "matrix"

NEWEST = ("numpy", "tensorflow-cpu", "torch")
OLDEST = (
    "numpy==1.26.*",
    "tensorflow-cpu==2.16.*",
    "torch==2.2.*",
    "pandas==2.2.*",
    "pyarrow==18.*",
)
"""The lower bounds of setup.py."""

PINNED = ("pytest", "pytest-xdist")
"""Of the versions in constraints.txt; no other pair keeps groups of tests together."""
TOOLS = ("pytest-timeout", "hypothesis")
EXTRAS = "demo,tls,tuning"
TESTS = (
    *("tests/data", "tests/values", "tests/feed/test_types_integration.py"),
    *("tests/driver/test_payload.py",),
    *("tests/driver/executors/test_spark_integration.py", "tests/tfos/test_dfutil_integration.py"),
    *("tests/driver/executors/test_parquet_scan_integration.py", "tests/test_spark_versions.py"),
    *("tests/driver/executors/test_scored_integration.py", "tests/ml/scoring/test_share.py"),
    *("tests/driver/executors/test_gpus_integration.py", "tests/control/test_values.py"),
    *("tests/ml/estimators/test_persistence_integration.py", "tests/diagnosis/test_doctor.py"),
    *("tests/ml/scoring/test_model_integration.py", "tests/test_torch_distributor.py"),
)
"""Those that ask most of Spark, of Python's own modules and of numpy."""
_TIMEOUT_S = 1800
_COLUMNS = ("pyspark", "numpy", "tensorflow-cpu", "torch")


@dataclass(frozen=True)
class Row:
    """One environment.

    Attributes:
        spark: version of pyspark, or empty for that of constraints.txt.
        libraries: numpy, TensorFlow, PyTorch.
    """

    spark: str
    python: str
    libraries: tuple[str, ...]

    @property
    def name(self) -> str:
        """What it is called on the command line, and in `build/matrix`."""
        return f"{self.spark or 'newest'}-{self.python}"

    @property
    def warnings(self) -> tuple[str, ...]:
        """Options by which warnings fail no test: older libraries have some of their own."""
        return () if not self.spark and self.libraries is NEWEST else ("-W", "default")

    @property
    def home(self) -> Path:
        """The virtual environment."""
        return FOLDER / self.name

    @property
    def executable(self) -> str:
        """Its Python."""
        return str(self.home / "bin" / "python")

    def file(self, suffix: str) -> Path:
        """Return a file of the last run: `log`, `xml` (what pytest reports) or `json`."""
        return FOLDER / f"{self.name}.{suffix}"


ROWS = (
    Row("3.5", "3.11", NEWEST),
    Row("3.5", "3.10", OLDEST),
    Row("4.0", "3.11", NEWEST),
    Row("4.0", "3.12", OLDEST),
    Row("4.2", "3.10", NEWEST),
    Row("", "3.12", NEWEST),
    Row("", "3.13", NEWEST),
)
"""Each Spark with old and new libraries, each Python with some Spark; `make test` is 3.11's newest.

Spark 3.5 does not know Python 3.12 (it imports distutils), Spark 4.3 no longer knows Python 3.10,
and Python 3.13 has no old libraries.
"""


def main(arguments: list[str]) -> int:
    """Run rows, or only print the table; return 1 if a test failed."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    is_told = arguments == ["--table"]
    rows = [row for row in ROWS if is_told or not arguments or row.name in arguments]
    if not is_told:
        rows = [row for row in rows if build(row)]
        for row in rows:
            print(f"{row.name}: see build/matrix/{row.name}.log", file=sys.stderr, flush=True)
            run(row)
    found = [report for row in rows if (report := read(row))]
    print("\n".join(table(found)))
    is_whole = is_told or len(found) == len(rows) > 0
    return int(not is_whole or any(report["failed"] for report in found))


def build(row: Row) -> bool:
    """Build the row's environment if it is not there; return False without its Python."""
    if (row.home / ".installed").exists():
        return True
    versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    homes = map(str, versions.glob(f"{row.python}.*/bin/python"))
    python = shutil.which(f"python{row.python}") or next(homes, None)
    if python is None:
        print(f"{row.name}: no Python {row.python} was found", file=sys.stderr)
        return False
    subprocess.run([python, "-m", "venv", "--clear", row.home], check=True)
    pip = [row.executable, "-m", "pip", "install", "-qq", *requirements(row)]
    subprocess.run(pip, cwd=ROOT, check=True)
    (row.home / ".installed").touch()
    return True


def run(row: Row) -> None:
    """Run the tests, and keep what they find."""
    own, report, start_s = row.executable, row.file("xml"), time.monotonic()
    report.unlink(missing_ok=True)
    tests = [own, "-m", "pytest", "-q", "-n", "2", "--dist", "loadgroup", "--no-loadscope-reorder"]
    with row.file("log").open("w") as log, suppress(subprocess.TimeoutExpired):
        subprocess.run(
            [*tests, *row.warnings, f"--junitxml={report}", *TESTS],
            cwd=ROOT,
            env=os.environ | {"PYSPARK_PYTHON": own, "PYSPARK_DRIVER_PYTHON": own},
            stdout=log,
            stderr=log,
            timeout=_TIMEOUT_S,
            check=False,
        )
    code = f"from importlib.metadata import version as v; print(*map(v, {_COLUMNS}))"
    versions = subprocess.run([own, "-c", code], capture_output=True, text=True, check=True)
    facts = {
        "versions": versions.stdout.split(),
        "seconds": round(time.monotonic() - start_s),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    }
    row.file("json").write_text(json.dumps(facts))


def requirements(row: Row) -> Iterator[str]:
    """Yield arguments for pip: of sparkdl's requirements those that the row names, and tools."""
    pins = dict(
        re.split("[;#]", line)[0].strip().split("==")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line and "python_version < " not in line
    )
    yield from (*(f"{name}=={pins[name]}" for name in PINNED), *TOOLS)
    yield f"pyspark=={row.spark}.*" if row.spark else f"pyspark=={pins['pyspark']}"
    # PyTorch as tested: the newest build may bring gigabytes for GPUs.
    yield from (f"torch=={pins['torch']}" if name == "torch" else name for name in row.libraries)
    yield from ("--config-settings", "editable_mode=compat", "-e", f".[{EXTRAS}]")


def read(row: Row) -> dict[str, Any] | None:
    """Return what the last run of a row found, if there was one."""
    facts, report = row.file("json"), row.file("xml")
    if not facts.exists() or not report.exists():
        return None
    cases = list(ElementTree.parse(report).iter("testcase"))
    bad = [case for case in cases if {part.tag for part in case} & {"failure", "error"}]
    skipped = [case for case in cases if case.find("skipped") is not None]
    return {
        **json.loads(facts.read_text()),
        "python": row.python,
        "passed": len(cases) - len(bad) - len(skipped),
        "failed": len(bad),
        "skipped": len(skipped),
    }


def table(reports: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of a table in Markdown."""
    head = ("pyspark", "Python", *_COLUMNS[1:], "passed", "failed", "skipped", "seconds", "date")
    yield f"| {' | '.join(head)} |"
    yield "| --- " * len(head) + "|"
    for each in reports:
        spark, *libraries = each["versions"]
        counts = (each[name] for name in ("passed", "failed", "skipped", "seconds", "date"))
        yield f"| {' | '.join(map(str, (spark, each['python'], *libraries, *counts)))} |"


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
