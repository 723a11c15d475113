"""The examples: some of them small, in this process; with `--deep` all, as a user starts them.

In this process they take the shared Spark session, and start neither a JVM nor an interpreter. Of
those that show the same by another framework or API, one runs so; of all, the names and options
that they use are looked up.
"""

from __future__ import annotations

import operator
import re
import runpy
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from tests.doubles.programs import output_of
from tests.examples.names import unknown_names
from tests.pages.test_pages import LONE

EXAMPLES = Path(__file__).parents[2] / "examples"
SUBMIT = Path(sys.executable).with_name("spark-submit")
DEADLINE_S = 240.0
COMPARISONS = {"<": operator.lt, ">": operator.gt, "=": operator.eq}

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("run_name"),
    pytest.mark.filterwarnings("default"),  # as for a user
]

Run = Callable[[str, list[str]], str]
"""Runs a script with arguments; returns what it printed."""


@dataclass(frozen=True)
class Example:
    """How an example is run, and what it must say.

    Attributes:
        needs: its framework, as the marker is named.
        says: words, and how the number behind them must be: `test accuracy > 0.9`; or several.
        options: with which a user starts it.
        small: options of the run in this process; `None` if it runs with `--deep` only.
        leaves: how many paths of the working folder match each pattern afterwards.
        library: a further one, without which it is skipped.
    """

    script: str
    needs: str
    says: str
    options: str = ""
    small: str | None = None
    leaves: Mapping[str, int] = field(default_factory=dict)
    library: str = "sklearn"

    @property
    def text(self) -> str:
        return (EXAMPLES / self.script).read_text(encoding="utf-8")

    @property
    def starter(self) -> str:
        """The program that runs it, by the line in it that starts it."""
        return starting_line(self.text, self.script)[1]


def starting_line(text: str, script: str) -> re.Match[str]:
    found = re.search(rf"^    (spark-submit|python) examples/{script}(.*)", text, re.MULTILINE)
    assert found, f"{script} does not begin with the line that starts it"
    return found


ALL = (
    Example("digits/train.py", "tensorflow", "test accuracy > 0.9"),
    Example(
        "segmentation/spark.py",
        "tensorflow",
        "validation loss < 0.3, over union > 0.6",
        "--images=1000",
    ),
    Example("tfrecords/train.py", "tensorflow", "training accuracy > 0.8"),
    Example("pipeline.py", "tensorflow", "area under the curve > 0.95"),
    Example("parameter_server.py", "tensorflow", "test accuracy > 0.85"),
    Example(
        "streaming.py",
        "tensorflow",
        "accuracy over the stream > 0.6",
        "--once",
        leaves={"out/stream.keras": 1},
    ),
    Example(
        "pytorch/train.py",
        "torch",
        "resumed at step = 50, last-epoch loss < 1",
        "--die-at=60 --checkpoints={out}/checkpoints",
        small="--die-at=60 --checkpoints={out}/checkpoints",
        leaves={f"out/checkpoints/*-{step:010}*": 1 for step in (225, 250, 275)},
    ),
    Example("pytorch/distributor.py", "torch", "TorchDistributor: accuracy > 0.85"),
    Example("huggingface/train.py", "torch", "last-epoch accuracy > 0.9", library="transformers"),
    Example("lightning/train.py", "torch", "validation accuracy > 0.8", library="lightning"),
    Example("horovod/torch_digits.py", "torch", "test accuracy > 0.8", "--fp16-allreduce"),
    Example(
        "horovod/keras_digits.py",
        "tensorflow",
        "test accuracy > 0.9",
        leaves={"out/horovod/digits.keras": 1},
    ),
    Example("jax/digits.py", "jax", "last-epoch loss < 1"),
)


def cases(examples: Iterable[Example]) -> list[Any]:
    """Return examples as cases, with the markers of what they need."""
    return [
        pytest.param(
            each,
            id=each.script,
            marks=[
                getattr(pytest.mark, each.needs),
                pytest.mark.skipif(not find_spec(each.library), reason=f"no {each.library}"),
                *([pytest.mark.spark] * (each.starter == "spark-submit")),
            ],
        )
        for each in examples
    ]


@pytest.fixture
def here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Run:
    """Runs a script in this process."""

    def run(script: str, options: list[str]) -> str:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [script, *options])
        monkeypatch.setattr(SparkSession, "stop", lambda self: None)  # it is that of all tests
        runpy.run_path(str(EXAMPLES / script), run_name="__main__")
        return capsys.readouterr().out

    return run


@pytest.fixture
def as_a_user(tmp_path: Path) -> Run:
    """Runs a script as its first lines say."""
    settings = ("spark.ui.enabled=false", "spark.sql.shuffle.partitions=4")
    conf = [word for setting in settings for word in ("--conf", setting)]
    starters = {
        "python": [sys.executable],
        "spark-submit": [str(SUBMIT), "--master", "local[4]", *conf],
    }

    def run(script: str, options: list[str]) -> str:
        path = EXAMPLES / script
        starter = starting_line(path.read_text(encoding="utf-8"), script)[1]
        env = {"PYSPARK_PYTHON": sys.executable}
        settings: Any = {"cwd": tmp_path, "env": env, "timeout_s": DEADLINE_S, "with_stderr": True}
        said = output_of(*starters[starter], path, *options, **settings)
        assert LONE not in said, said[-4000:]
        return said

    return run


def prove(example: Example, run: Run, folder: Path, *, is_small: bool = False) -> None:
    """Run an example, and check what it says, and what it leaves in `folder`."""
    options = (example.small or "") if is_small else example.options
    output = run(example.script, options.format(out=folder / "out").split())
    for said in example.says.split(", "):
        words, sign, number = said.rsplit(" ", 2)
        found = re.findall(rf"{words} (\d+(?:\.\d+)?)", output)
        assert found, output[-4000:]
        assert COMPARISONS[sign](float(found[-1]), float(number)), output[-4000:]
    left = {pattern: len([*folder.glob(pattern)]) for pattern in example.leaves}
    assert left == example.leaves


@pytest.mark.smoke
@pytest.mark.parametrize("example", cases(each for each in ALL if each.small is not None))
def test_example_on_spark(
    example: Example, here: Run, tmp_path: Path, spark_local: SparkSession
) -> None:
    prove(example, here, tmp_path, is_small=True)


@pytest.mark.deep
@pytest.mark.parametrize("example", cases(ALL))
def test_example_as_a_user_starts_it(example: Example, as_a_user: Run, tmp_path: Path) -> None:
    prove(example, as_a_user, tmp_path)


def test_every_example_is_run_and_in_the_index() -> None:
    index = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    scripts = {path.relative_to(EXAMPLES).as_posix() for path in EXAMPLES.rglob("*.py")}
    assert scripts == {each.script for each in ALL}
    assert not [script for script in scripts if f"({script})" not in index]


@pytest.mark.parametrize("example", ALL, ids=lambda example: example.script)
def test_names_and_options_of_an_example_exist(example: Example) -> None:
    assert not unknown_names(example.text)
    line = starting_line(example.text, example.script)[2]
    used = re.findall(r"--[\w-]+", " ".join((line, example.options, example.small or "")))
    assert not [option for option in used if f'.add_argument("{option}"' not in example.text]
