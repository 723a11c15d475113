"""The wheel, installed away from this checkout: files, programs, requirements, types; packed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import sparkdl
from sparkdl import cli
from tests.doubles.programs import output_of
from tests.doubles.sessions import SparkSessions, make_home
from tests.pages.blocks import PAGES, blocks_of

pytestmark = pytest.mark.timeout(300)
ROOT = Path(sparkdl.__file__).parents[1]
ALONE = {"PYTHONPATH": ""}
"""The tests' own path would have pip and Python find this checkout."""
PROGRAM = """
from __future__ import annotations

import sys

from pyspark.sql import SparkSession

import sparkdl


def train(args: int, ctx: sparkdl.NodeContext) -> tuple[int, str, str]:
    rows = sum(len(batch["id"]) for batch in ctx.batches(args, columns=["id"], pad=None))
    return rows, sys.prefix, sparkdl.__file__


def main() -> None:
    spark = SparkSession.builder.getOrCreate()
    with sparkdl.launch(spark, train, 10, nodes=2, framework="plain") as cluster:
        report = cluster.feed(spark.range(100))
        for rows, prefix, file in cluster.results():
            print("node:", rows, prefix, file)
    print("fed:", report.rows_used)
    spark.stop()


def mistake(spark: SparkSession) -> None:
    sparkdl.launch(spark, train, 10, nodes="two")  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from a copy, so that nothing that lies about in the checkout gets in."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    shutil.copytree(ROOT / "sparkdl", source / "sparkdl", ignore=shutil.ignore_patterns("*.pyc"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, source)
    pip = (sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation")
    output_of(*pip, "-w", folder, source, timeout_s=300)
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel, what it requires, and pyspark; returns its folder."""
    return fresh(wheel, tmp_path_factory.mktemp("fresh"), "spark")


def fresh(wheel: Path, folder: Path, *extras: str) -> Path:
    """Install the wheel into a new environment, with links to what it declares, and no more.

    The tests' environment has all packages already, so this needs no package index. A package that
    sparkdl imports without a declaration is missing.
    """
    venv = folder / "venv"
    output_of(sys.executable, "-m", "venv", "--without-pip", venv)
    pip = (sys.executable, "-m", "pip", "--python", venv / "bin/python")
    output_of(*pip, "install", "-q", "--no-deps", wheel, timeout_s=120, cwd=folder, env=ALONE)
    (site,) = venv.glob("lib/python*/site-packages")
    (own,) = metadata.distributions(path=[str(site)])
    waiting = [*needs(own, extras)]
    for each in waiting:
        package = metadata.distribution(each.name)
        waiting += [new for new in needs(package, each.extras) if new not in waiting]
        for name in {file.parts[0] for file in package.files or ()} - {"..", "__pycache__"}:
            if not (site / name).exists():
                (site / name).symlink_to(str(package.locate_file(name)))
    assert "No broken requirements" in output_of(*pip, "check", cwd=folder, env=ALONE)
    return venv


def run(venv: Path, *command: str | Path) -> str:
    """Run a program of the environment, outside of the checkout."""
    program, *arguments = command
    env = {**ALONE, "PYSPARK_PYTHON": str(venv / "bin/python")}
    return output_of(venv / "bin" / program, *arguments, timeout_s=240, cwd=venv.parent, env=env)


def needs(package: metadata.Distribution, extras: Iterable[str]) -> Iterator[Requirement]:
    for each in map(Requirement, package.requires or ()):
        marker = each.marker
        if marker is None or any(marker.evaluate({"extra": name}) for name in ("", *extras)):
            yield each


@pytest.mark.smoke
def test_wheel_has_every_file_of_the_package(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if name.startswith("sparkdl/")}
    here = (path for path in (ROOT / "sparkdl").rglob("*") if path.is_file())
    assert names == {
        path.relative_to(ROOT).as_posix() for path in here if "__pycache__" not in path.parts
    }


@pytest.mark.smoke
def test_programs_of_the_wheel_run_outside_of_the_checkout(installed: Path) -> None:
    where = run(installed, "python", "-c", "import sparkdl; print(sparkdl.__file__)")
    assert Path(where.strip()).is_relative_to(installed)
    assert run(installed, "sparkdl", "--version").split()[-1] == sparkdl.__version__
    commands = re.search(r"\{([a-z,]+)\}", run(installed, "sparkdl", "--help"))
    assert commands, cli.__file__
    for command in commands[1].split(","):
        assert f"usage: sparkdl {command}" in run(installed, "sparkdl", command, "--help")
    for command, lacks in {"demo": "torch", "dashboard ..": "bokeh"}.items():
        program = [str(installed / "bin/sparkdl"), *command.split()]
        said = subprocess.run(program, capture_output=True, text=True, check=False).stderr
        assert (
            said
            == f"sparkdl {command.split()[0]}: No module named '{lacks}'. Run pip install {lacks}\n"
        )


@pytest.mark.smoke
@pytest.mark.spark
@pytest.mark.torch
def test_demo_and_first_program_of_readme_need_only_torch(wheel: Path, tmp_path: Path) -> None:
    blocks = blocks_of((ROOT / "README.md").read_text(encoding="utf-8"))
    code = next(each.code for each in blocks if each.heading == "The first program")
    for large, small in {"20_000": "2_000", "=50": "=2", "/tmp/": f"{tmp_path}/"}.items():
        assert code.count(large) == 1
        code = code.replace(large, small)
    (tmp_path / "first.py").write_text(code, encoding="utf-8")
    venv = fresh(wheel, tmp_path, "torch")
    assert re.search(r"accuracy (0\.9|1\.0)", run(venv, "sparkdl", "demo"))
    assert "loss by node: [" in run(venv, "python", tmp_path / "first.py")


@pytest.mark.smoke
def test_every_extra_is_on_a_page(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (each for each in archive.namelist() if each.endswith(".dist-info/METADATA"))
        extras = re.findall(r"^Provides-Extra: (.+)$", archive.read(name).decode(), re.MULTILINE)
    text = "".join(path.read_text(encoding="utf-8") for path in PAGES)
    assert [each for each in extras if not re.search(rf"[\[,]{each}[,\]](?!\()", text)] == ["dev"]


@pytest.mark.smoke
def test_modules_of_the_wheel_import_without_extras_or_name_what_lacks(installed: Path) -> None:
    code = """
import importlib, pkgutil, sparkdl
for module in pkgutil.walk_packages(sparkdl.__path__, "sparkdl.", onerror=lambda name: None):
    if module.name.endswith("__main__"):
        continue
    try:
        importlib.import_module(module.name)
    except ImportError as error:
        print(module.name, "|", error)
"""
    lacking = run(installed, "python", "-c", code).splitlines()
    extras = "tensorflow|keras|torch|jax|lightning|bokeh|jinja2|mlflow|deepspeed|optuna"
    assert [line for line in lacking if not re.search(extras, line.partition("|")[2])] == []


@pytest.mark.deep
def test_users_program_is_checked_by_its_types(installed: Path, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    (tmp_path / "mypy.ini").write_text("[mypy]\n")
    mypy = (sys.executable, "-m", "mypy", "--strict", "--config-file", tmp_path / "mypy.ini")
    python = ("--python-executable", installed / "bin/python", "--cache-dir", tmp_path / "cache")
    said = output_of(*mypy, *python, program, cwd=tmp_path, timeout_s=300, env=ALONE)
    assert "Success: no issues found in 1 source file" in said


@pytest.mark.deep
@pytest.mark.spark
@pytest.mark.timeout(1200)
def test_packed_environment_travels_with_spark_submit(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that the wheel requires comes from the package index; executors have Spark's pyspark."""
    packed, archive = tmp_path / "packed", tmp_path / "environment.tar.gz"
    output_of(sys.executable, "-m", "venv", packed, timeout_s=120)
    pip = (packed / "bin/python", "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt")
    output_of(*pip, wheel, "venv-pack", timeout_s=600, cwd=tmp_path, env=ALONE)
    pack = (packed / "bin/venv-pack", "-q", "-p", packed, "-o", archive)
    output_of(*pack, "--compress-level", "1", timeout_s=300, env=ALONE)
    (tmp_path / "train.py").write_text(PROGRAM)
    monkeypatch.setenv("SPARK_HOME", str(make_home(tmp_path / "home")))
    monkeypatch.setenv("PYTHONPATH", "")  # the workers' executors inherit it
    sessions = SparkSessions(tmp_path)
    try:
        url = sessions.start_standalone()
        conf = ("--conf", "spark.ui.enabled=false", "--conf", "spark.executor.memory=1g")
        submit = (tmp_path / "home/bin/spark-submit", "--master", url, *conf)
        # What docs/deployment.md says of the cluster mode.
        refused = subprocess.run(
            [*submit, "--deploy-mode", "cluster", tmp_path / "train.py"],
            capture_output=True, text=True, timeout=120, check=False, env=os.environ | ALONE,
        )  # fmt: skip
        assert "not supported for python applications on standalone" in refused.stderr.replace(
            "Python", "python"
        )
        said = output_of(
            *submit, "--archives", f"{archive}#environment", tmp_path / "train.py",
            env={
                "PYSPARK_PYTHON": "./environment/bin/python",
                "PYSPARK_DRIVER_PYTHON": str(packed / "bin/python"),
                **ALONE,
            },
            cwd=tmp_path, timeout_s=600,
        )  # fmt: skip
    finally:
        sessions.stop()
    nodes = [line.split()[1:] for line in said.splitlines() if line.startswith("node: ")]
    assert sum(int(rows) for rows, _, _ in nodes) == 100
    assert "fed: 100" in said
    for _, prefix, file in nodes:
        assert Path(prefix).is_relative_to(tmp_path)
        assert f"{os.sep}environment{os.sep}" in file, "the archive's, in the executor's folder"
