"""`sparkdl migrate`: imports are changed, nothing else, and once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sparkdl import cli
from sparkdl.migrate import migrated

OLD = '''\
"""Trains with horovod; see https://github.com/horovod/horovod."""
import os, horovod.torch as hvd  # horovod's
import horovod.spark
import tensorflowonspark
from horovod import spark as ä; import horovod.keras
from tensorflowonspark import TFCluster, TFNode
from pyspark.ml.torch.distributor import TorchDistributor
from horovod.spark import (
    run,  # one
    run_elastic,
)
ä = "é"; horovod.spark.run(print, horovod.__name__)
cluster = tensorflowonspark.TFCluster.run(accelerator='horovod')
'''
NEW = '''\
"""Trains with horovod; see https://github.com/horovod/horovod."""
import os, sparkdl.horovod.torch as hvd  # horovod's
import sparkdl.horovod.spark
import sparkdl.tfos
from sparkdl.horovod import spark as ä; import sparkdl.horovod.keras
from sparkdl.tfos import TFCluster, TFNode
from sparkdl import TorchDistributor
from sparkdl.horovod.spark import (
    run,  # one
    run_elastic,
)
ä = "é"; sparkdl.horovod.spark.run(print, sparkdl.horovod.__name__)
cluster = sparkdl.tfos.TFCluster.run(accelerator='horovod')
'''


def test_imports_and_uses_change_and_comments_strings_and_links_stay() -> None:
    done = migrated(OLD)
    assert done.text == NEW
    assert done.changes == 11
    assert not done.warnings


def test_classes_and_converters_of_other_packages_change() -> None:
    old = (
        "from spark_tensorflow_distributor import MirroredStrategyRunner\n"
        "from pyspark.ml.deepspeed.deepspeed_distributor import DeepspeedTorchDistributor as D\n"
        "from petastorm.spark import SparkDatasetConverter, make_spark_converter\n"
        "from petastorm import TransformSpec\n"
        "from sparkdl import HorovodRunner\n"
        "from sparkdl.transformers import Checkpoint\n"
    )
    done = migrated(old)
    assert not done.warnings
    assert done.text == (
        "from sparkdl import MirroredStrategyRunner\n"
        "from sparkdl import DeepspeedTorchDistributor as D\n"
        "from sparkdl.petastorm.spark import SparkDatasetConverter, make_spark_converter\n"
        "from sparkdl.petastorm import TransformSpec\n"
        "from sparkdl import HorovodRunner\n"
        "from sparkdl.transformers import Checkpoint\n"
    )
    exec(done.text, {})  # they are all there
    assert migrated(done.text).changes == 0


def test_second_run_changes_nothing_and_line_ends_and_marks_stay() -> None:
    again = migrated(NEW)
    assert (again.text, again.changes) == (NEW, 0)
    marked = "\ufeffimport horovod.torch as hvd\r\nhvd.init()\r\n"
    assert migrated(marked).text == marked.replace("horovod", "sparkdl.horovod")


@pytest.mark.parametrize(
    ("program", "told"),
    [
        ("from \\\n    horovod import torch", "horovod is not changed here: write sparkdl.horovod"),
        ("import spark_tensorflow_distributor", "`from sparkdl import MirroredStrategyRunner`"),
        (
            "from pyspark.ml.torch.distributor import (\n    TorchDistributor, Distributor)",
            "`from sparkdl import TorchDistributor` in a line of its own",
        ),
    ],
)
def test_places_that_the_user_has_to_change_are_named(program: str, told: str) -> None:
    assert any(told in text for _, text in migrated(program).warnings)


def test_names_that_sparkdl_lacks_are_errors_of_the_program() -> None:
    with pytest.raises(ImportError, match="arrays of numbers"):
        exec(migrated("from petastorm.codecs import ScalarCodec").text, {})
    with pytest.raises(ImportError, match="retired: use PyTorch or TensorFlow"):
        exec(migrated("import horovod.mxnet").text, {})


def test_files_change_once_by_whatever_link_and_a_dry_run_changes_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program, link, wrong = (tmp_path / name for name in ("a.py", "b.py", "c.py"))
    program.write_text("import horovod.torch as hvd\n", encoding="utf-8")
    link.symlink_to(program)
    wrong.write_text("print 'horovod'\n", encoding="utf-8")
    assert cli.main(["migrate", "--diff", str(program)]) == 0
    assert "+import sparkdl.horovod.torch as hvd" in capsys.readouterr().out
    assert program.read_text(encoding="utf-8") == "import horovod.torch as hvd\n"
    assert cli.main(["migrate", str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert f"{wrong}: not changed: SyntaxError" in printed
    assert printed.endswith("1 changes in 1 of 2 files\n")
    assert program.read_text(encoding="utf-8") == "import sparkdl.horovod.torch as hvd\n"
    assert link.is_symlink()
    assert cli.main(["migrate", str(program), str(link)]) == 0
    assert capsys.readouterr().out == "0 changes in 0 of 1 files\n"


def test_cells_of_a_notebook_change_and_magics_and_text_stay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def cell(kind: str, *source: str) -> dict[str, object]:
        return {"cell_type": kind, "source": list(source)}

    cells = [
        cell("markdown", "import horovod"),
        cell("code", "%time\n", "import tensorflowonspark\n", "!pip install horovod"),
        cell("code", "%%bash\n", "ls"),
        cell("code", "tensorflowonspark.TFCluster?\n", "tensorflowonspark.TFCluster"),
        cell("code", "files = !ls"),
    ]
    path = tmp_path / "n.ipynb"
    path.write_text(json.dumps({"cells": cells}), encoding="utf-8")
    assert cli.main(["migrate", str(path)]) == 0
    markdown, first, shell, second, other, *_ = json.loads(path.read_text("utf-8"))["cells"]
    assert markdown["source"] == ["import horovod"]
    assert first["source"] == ["%time\n", "import sparkdl.tfos\n", "!pip install horovod"]
    assert shell["source"] == ["%%bash\n", "ls"]
    assert second["source"] == ["tensorflowonspark.TFCluster?\n", "sparkdl.tfos.TFCluster"]
    assert other["source"] == ["files = !ls"]
    printed = capsys.readouterr().out
    assert f"{path}:1: cell 2 of code is not Python, and not changed: %%bash" in printed
    assert "cell 4 of code is not Python, and not changed: files = !ls" in printed
