"""Lay out the sources of the documentation site, and build it; see mkdocs.yml.

Pages link to each other, to examples and to notebooks by their paths in the repository, as GitHub
shows them. The sources of the site are therefore a copy of these files at the same paths, and pages
of the reference, which list the public names for mkdocstrings to fill in.

Usage: python -m scripts.site [--serve]
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "build" / "site-source"
COPIED = ("*.md", "docs/**/*", "examples/**/*", "notebooks/*.ipynb", "benchmarks/README.md",
          "tests/faults/README.md", "LICENSE")  # fmt: skip
_LINK = re.compile(r"\[([^\]]*)\]\(([^)\s:]+)\)")

REFERENCE = {
    "sparkdl": (
        "sparkdl",
        "The functions and classes that a program calls at the driver.",
        ("driver.launch.launch", "driver.launch.run", "driver.handle.Cluster",
         "storage.parquet.paths.parquet",
         "core.options.Roles", "core.options.Recovery", "core.options.Feeding",
         "driver.options.Observe", "core.options.Startup",
         "core.failure.Failure", "diagnosis.doctor.doctor",
         "distributors.TorchDistributor",
         "distributors.DeepspeedTorchDistributor",
         "distributors.MirroredStrategyRunner",
         "petastorm.spark.make_spark_converter",
         "petastorm.spark.SparkDatasetConverter", "mlflow"),
    ),
    "nodes": (
        "Nodes",
        "The `ctx` of `map_fun(args, ctx)`, and the callbacks for code in a node.",
        ("node.context.NodeContext", "keras", "lightning", "transformers"),
    ),
    "ml": (
        "Spark ML",
        "Stages of Spark ML pipelines.",
        ("ml.estimators.keras_estimator.KerasEstimator",
         "ml.estimators.torch_estimator.TorchEstimator",
         "ml.estimators.torch_estimator.LightningEstimator",
         "ml.estimators.transformers_estimator.TransformersEstimator",
         "ml.estimators.estimator.TFEstimator",
         "ml.scoring.model.KerasModel", "ml.scoring.model.TFModel",
         "ml.scoring.model.TorchModel", "ml.scoring.predict.predict",
         "ml.scoring.engines.VLLMEngine", "ml.scoring.engines.AsyncVLLMEngine",
         "ml.scoring.engines.TransformersEngine",
         "ml.tuning.search"),
    ),
    "errors": ("Errors", "Each error is a `SparkdlError`, and one of Python's where one fits.",
               ("core.errors",)),
    "data": ("Data", "TFRecord files as a data source of Spark.", ("data",)),
    "horovod": ("Horovod", "Horovod's names: `import sparkdl.horovod.torch as hvd`.",
                ("horovod.runner_base.HorovodRunner", "horovod.spark", "horovod.torch",
                 "horovod.tensorflow", "horovod.keras")),
    "tfos": ("TensorFlowOnSpark's names", "`from sparkdl.tfos import TFCluster`.",
             ("tfos.TFCluster", "tfos.TFNode", "tfos.TFParallel", "tfos.TFSparkNode",
              "tfos.pipeline", "tfos.dfutil", "tfos.util")),
}  # fmt: skip
"""By page: its title, its subject, and the modules, classes and functions on it."""


def lay_out() -> None:
    """Copy the pages, and write those of the reference."""
    shutil.rmtree(SOURCE, ignore_errors=True)
    for pattern in COPIED:
        for path in ROOT.glob(pattern):
            if path.is_file() and "__pycache__" not in path.parts:
                target = SOURCE / path.relative_to(ROOT)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, target)
    for page in SOURCE.rglob("*.md"):
        text = page.read_text(encoding="utf-8")
        page.write_text(_LINK.sub(partial(_kept, page), text), encoding="utf-8")
    folder = SOURCE / "reference"
    folder.mkdir()
    for name, (title, about, members) in REFERENCE.items():
        parts = [f"# {title}", about, *(f"::: sparkdl.{member}" for member in members)]
        (folder / f"{name}.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def _kept(page: Path, link: re.Match[str]) -> str:
    """Return a link as it was, or its text alone if the target is not on the site."""
    target = page.parent / link[2].partition("#")[0]
    return link[0] if target.is_file() or link[2].startswith("#") else link[1]


def main() -> int:
    """Build the site, or serve it while pages change."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--serve", action="store_true", help="serve it at 127.0.0.1:8000")
    given = parser.parse_args()
    lay_out()
    command = [sys.executable, "-m", "mkdocs", "serve" if given.serve else "build"]
    quiet = {"NO_MKDOCS_2_WARNING": "1"}  # about what will once replace it
    return subprocess.run(command, cwd=ROOT, env=os.environ | quiet, check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main())
