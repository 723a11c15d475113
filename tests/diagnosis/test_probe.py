"""The task's part needs no more than Python: it comes by value."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

from pyspark import cloudpickle

from sparkdl.diagnosis import probe
from sparkdl.diagnosis.executors import by_value

PROGRAM = """
import json, pickle, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "sparkdl":
            raise ModuleNotFoundError(f"No module named {name!r}")

sys.meta_path.insert(0, Absent())
with open(sys.argv[1], "rb") as file:
    print(json.dumps(pickle.load(file)()))
"""


def test_executor_without_sparkdl_tells_of_itself(tmp_path: Path) -> None:
    order = {"host": "", "port": 0, "token": "t", "wait_s": 1.0, "limit_s": 9.0, "looks": {}}
    with by_value(probe):
        code = cloudpickle.dumps(partial(probe.facts_of, order))  # type: ignore[no-untyped-call]
    (tmp_path / "task").write_bytes(code)
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "task")]
    found = json.loads(subprocess.run(command, capture_output=True, timeout=60, check=True).stdout)
    assert "sparkdl" not in found["versions"]
    assert found["versions"]["Python"] == probe.basics()["versions"]["Python"]
    assert found["versions"]["pyarrow"]
