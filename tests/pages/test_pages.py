"""The Python of the documentation: names and options exist; with `--deep` it runs, and so do
the files and commands of `strangers.md`."""

from __future__ import annotations

import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.doubles.programs import output_of
from tests.examples.names import unknown_names
from tests.pages.blocks import PAGES, PRELUDES, as_read, as_run, blocks_of, preludes_of

DEADLINE_S = 280.0
LONE = "they train separate models"
"""A warning that no page's program deserves: they exchange gradients, or do not train."""
SMALLER = {
    "num_executors=4": "num_executors=2",
    "nodes=4": "nodes=2",
    "nodes=8": "nodes=2",
    "min_nodes=6": "min_nodes=1",
    "num_workers=4": "num_workers=2",
    "num_processes=4": "num_processes=2",
    "num_proc=4": "num_proc=2",
    "setClusterSize(4)": "setClusterSize(2)",
    "setEpochs(10)": "setEpochs(2)",
    "epochs=20,": "epochs=2,",
    '"trials": 50': '"trials": 8',
    "trials=50": "trials=8",
    "epochs=50)": "epochs=2)",
    "range(8_000)": "range(2_000)",
    "trials=10": "trials=2",
    "every_steps=500": "every_steps=4",
    "% 500 == 0": "% 4 == 0",
    '"transformers"': '"sklearn"',
    '"http://mlflow.example:5000"': '"sqlite:///runs.db"',
}
"""What the run replaces, so that it needs a laptop and not a cluster."""
AS_LARGE_AS_IT_SAYS = ("jax.md", "tensorflow.md")
"""Pages whose clusters cannot be smaller."""
PLACES = (
    *("hdfs:///", "hdfs://namenode/", "s3://bucket/"),
    *("/models/", "/data/", "/mnt/shared/", "/tmp/"),
)
"""Beginnings of paths on a page, which become folders of the run."""

STRANGERS = Path(__file__).with_name("strangers.md").read_text(encoding="utf-8")
NEEDS = {
    "README.md": ("torch",),
    "data.md": ("tensorflow",),
    "deployment.md": ("torch",),
    "guide.md": ("tensorflow",),
    "horovod.md": ("keras", "tensorflow", "torch"),
    "jax.md": ("jax", "keras", "torch"),
    "migrating.md": ("tensorflow", "torch"),
    "observing.md": ("mlflow", "sqlalchemy", "tensorboard", "tensorflow", "torch"),
    "pytorch.md": ("lightning", "torch", "transformers"),
    "recovery.md": ("jax", "tensorflow", "torch"),
    "scoring.md": ("tensorflow", "torch"),
    "spark-ml.md": ("keras", "lightning", "optuna", "tensorflow", "torch"),
    "tensorflow.md": ("tensorflow",),
    "tutorial.md": ("sklearn", "torch"),
}
"""Libraries without which a page is skipped."""


def running() -> list[Any]:
    """Return the pages that have something to run as cases."""
    return [
        pytest.param(
            page,
            id=page.name,
            marks=pytest.mark.skipif(
                not all(find_spec(each) for each in NEEDS.get(page.name, ())),
                reason=f"needs {NEEDS.get(page.name)}",
            ),
        )
        for page in PAGES
        if as_run(page)
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_and_options_on_a_page_exist(page: Path) -> None:
    assert not unknown_names(as_read(blocks_of(page.read_text(encoding="utf-8"))))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_reasons_for_not_running_are_before_blocks(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text.count("<!-- not run") == sum(bool(each.not_run) for each in blocks_of(text))


def test_every_prelude_is_of_a_page_that_is_run() -> None:
    used = {path for page in PAGES if as_run(page) for path in preludes_of(page)}
    assert used == set(PRELUDES.glob("*.py"))


def run(*command: Any, folder: Path, env: dict[str, str]) -> None:
    print(said := output_of(*command, cwd=folder, env=env, timeout_s=DEADLINE_S, with_stderr=True))
    assert LONE not in said


@pytest.mark.deep
@pytest.mark.spark
@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", running())
def test_page_runs(page: Path, tmp_path: Path) -> None:
    program = as_run(page)
    if page.name not in AS_LARGE_AS_IT_SAYS:
        for large, small in SMALLER.items():
            program = program.replace(large, small)
    for number, place in enumerate(PLACES):
        program = program.replace(f'"{place}', f'"PLACE-{number}/')
    for number in range(len(PLACES)):
        program = program.replace(f'"PLACE-{number}/', f'"{tmp_path}/{number}/')
        (tmp_path / str(number)).mkdir()
    path = tmp_path / "program.py"
    path.write_text(program, encoding="utf-8")
    conf = ("spark.ui.enabled=false", "spark.sql.shuffle.partitions=2")
    submit = " ".join(["--master local[12]", *(f"--conf {each}" for each in conf), "pyspark-shell"])
    env = {"PYSPARK_PYTHON": sys.executable, "PYSPARK_SUBMIT_ARGS": submit}
    run(sys.executable, path, folder=tmp_path, env=env)


@pytest.mark.deep
@pytest.mark.spark
@pytest.mark.tensorflow
@pytest.mark.torch
@pytest.mark.timeout(300)
@pytest.mark.parametrize("question", re.findall(r"^## (.+)$", STRANGERS, re.MULTILINE))
def test_strangers_path_leads_somewhere(question: str, tmp_path: Path) -> None:
    section = STRANGERS.partition(f"\n## {question}\n")[2].partition("\n## ")[0]
    for code in re.findall(r"```python\n(.*?)```", section, re.DOTALL):
        (tmp_path / code.splitlines()[0].removeprefix("# ")).write_text(code, encoding="utf-8")
    (commands,) = re.findall(r"```sh\n(.*?)```", section, re.DOTALL)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {"PATH": path, "PYSPARK_PYTHON": sys.executable}
    run("bash", "-e", "-c", commands, folder=tmp_path, env=env)
