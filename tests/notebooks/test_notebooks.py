"""The notebooks: with `--deep` executed in kernels of their own; and as they are saved."""

from __future__ import annotations

import getpass
import re
import socket
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest

from tests.doubles.programs import output_of
from tests.examples.names import unknown_names

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
EXECUTE = Path(sys.executable).with_name("jupyter-execute")
DEADLINE_S = 240.0
MAX_NBYTES = 300_000

OF_A_MACHINE = (
    *(rf"/{folder}/" for folder in ("home", "root", "tmp", "work", "usr", "var", "Users")),
    r"site-packages",
    rf"\b{re.escape(socket.gethostname())}\b",
    rf"\b{re.escape(getpass.getuser())}\b",
    r"\bWARN",
    r"Warning",
)

FIGURES = {
    "embeddings.ipynb": {"the same digit: share": 0.7},
    "pytorch_restart.ipynb": {
        "test accuracy": 0.8,
        "first step after the restart": 20,
        "steps with one loss in all runs: share": 0.99,
    },
    "spark_ml_pipeline.ipynb": {"test accuracy": 0.9, "area under ROC": 0.97},
}


def code_cells(path: Path) -> list[Any]:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def outputs(path: Path) -> list[Any]:
    return [output for cell in code_cells(path) for output in cell.outputs]


def text_of(output: Any) -> str:
    """Return what a reader sees of an output as text; errors with their traceback."""
    data = output.get("data", {})
    texts = [text for kind, text in data.items() if kind.startswith("text/")]
    return "\n".join([output.get("text", ""), *texts, *output.get("traceback", ())])


def check_figures(name: str, said: str) -> None:
    for what, at_least in FIGURES[name].items():
        found = re.search(rf"{what} ([\d.]+)$", said, re.MULTILINE)
        assert found, said
        assert float(found[1]) > at_least


@pytest.mark.deep
@pytest.mark.spark
@pytest.mark.tensorflow
@pytest.mark.usefixtures("run_name")
@pytest.mark.parametrize("name", FIGURES)
def test_notebook_runs_from_its_first_cell_to_its_last(name: str, tmp_path: Path) -> None:
    executed = tmp_path / name
    env = {"IPYTHONDIR": str(tmp_path), "PYSPARK_PYTHON": sys.executable}
    command = (EXECUTE, f"--output={executed}", NOTEBOOKS / name)
    output_of(*command, cwd=tmp_path, env=env, timeout_s=DEADLINE_S)
    check_figures(name, "\n".join(map(text_of, outputs(executed))))


@pytest.mark.parametrize("name", FIGURES)
def test_names_that_a_notebook_uses_exist(name: str) -> None:
    cells = code_cells(NOTEBOOKS / name)
    assert not unknown_names("\n".join(cell.source for cell in cells))


def test_every_notebook_is_executed() -> None:
    assert {path.name for path in NOTEBOOKS.glob("*.ipynb")} == FIGURES.keys()


@pytest.mark.parametrize("name", FIGURES)
def test_notebook_is_saved_with_its_outputs(name: str) -> None:
    cells = code_cells(NOTEBOOKS / name)
    assert [cell.execution_count for cell in cells] == [*range(1, len(cells) + 1)]
    kinds = {kind for cell in cells for out in cell.outputs for kind in out.get("data", ())}
    assert {"image/png", "text/plain"} <= kinds
    assert all(output.output_type != "error" for cell in cells for output in cell.outputs)
    assert (NOTEBOOKS / name).stat().st_size < MAX_NBYTES


@pytest.mark.parametrize("name", FIGURES)
def test_saved_outputs_tell_nothing_of_the_machine(name: str) -> None:
    said = "\n".join(map(text_of, outputs(NOTEBOOKS / name)))
    for pattern in OF_A_MACHINE:
        found = re.search(rf".*{pattern}.*", said)
        assert found is None, f"{name}: {found and found[0]}; save it with scripts/generate.py"
