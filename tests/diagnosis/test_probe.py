"""The task's part needs no more than Python: it comes by value."""

from __future__ import annotations

import json
import socket
import sys
from functools import partial
from pathlib import Path

import pytest
from pyspark import cloudpickle

from sparkdl.diagnosis import probe
from sparkdl.driver.executors.sessions import pickle_by_value
from tests.doubles.programs import output_of

pickle_by_value(probe)

PROGRAM = """
import pickle, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "sparkdl":
            raise ModuleNotFoundError(f"No module named {name!r}")

sys.meta_path.insert(0, Absent())
with open(sys.argv[1], "rb") as file:
    (batch,) = pickle.load(file)([])
    print(batch["facts"][0])
"""


@pytest.mark.parametrize("is_open", [True, False])
def test_executor_without_sparkdl_tells_of_itself_and_of_its_way_to_the_driver(
    tmp_path: Path, is_open: bool
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        where = server.getsockname()
        if not is_open:
            server.close()
        code = cloudpickle.dumps(partial(probe.run_probe, *where))  # type: ignore[no-untyped-call]
        (tmp_path / "task").write_bytes(code)
        found = json.loads(output_of(sys.executable, "-c", PROGRAM, tmp_path / "task"))
    assert "sparkdl" not in found["versions"]
    assert found["versions"]["Python"] == probe.basics()["versions"]["Python"]
    assert found["versions"]["pyarrow"]
    assert ("unreachable" in found) == (not is_open)


@pytest.mark.parametrize("has_ours", [False, True])
def test_executor_names_another_package_imported_as_sparkdl(tmp_path: Path, has_ours: bool) -> None:
    package = tmp_path / "sparkdl"
    (package / "transformers").mkdir(parents=True)
    (package / "__init__.py").write_text("" if has_ours else "raise RuntimeError('no TensorFlow')")
    if has_ours:
        (package / "version.py").write_text("__version__ = '1.2'")
    code = cloudpickle.dumps(probe.basics)  # type: ignore[no-untyped-call]
    (tmp_path / "task").write_bytes(code)
    program = "import json, pickle, sys; print(json.dumps(pickle.load(open(sys.argv[1], 'rb'))()))"
    command = (sys.executable, "-c", program, tmp_path / "task")
    found = json.loads(output_of(*command, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}))
    assert found["package"] == str(package)
    assert found["versions"].get("sparkdl") == ("1.2" if has_ours else None)
