"""Spark's own names in user code on a node: files and broadcasts are there, the rest says why."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import sparkdl
from sparkdl.core.errors import ConfigError
from sparkdl.core.options import Feeding, Startup
from sparkdl.driver.payload import pickle_user_code
from tests.doubles.nodes import SOON_S, launch as launch_here

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def said(call: Callable[[], Any]) -> str:
    try:
        return f"gave {call()!r}"
    except Exception as error:  # noqa: BLE001 (the tests look at all of them)
        return f"{type(error).__name__}: {error}"


def try_all(args: Any, ctx: Any) -> dict[str, str]:
    from pyspark import SparkContext, SparkFiles, TaskContext
    from pyspark.sql import SparkSession

    return {
        "file": said(lambda: Path(SparkFiles.get("words.txt")).read_text()),
        "broadcast": said(lambda: args and (args["words"].value, args["words"] is args["same"])),
        "session": said(SparkSession.builder.getOrCreate),
        "context": said(SparkContext),
        "active": said(SparkSession.getActiveSession),
        "task": said(TaskContext.get),
    }


REFUSED = {
    "session": "SparkContext and SparkSession cannot be used inside map_fun: nodes have no Spark. "
    "Use them in the driver",
    "context": "SparkContext and SparkSession cannot be used",
}


def check(found: dict[str, str]) -> None:
    for name, text in REFUSED.items():
        assert found[name].startswith(f"ConfigError: {text}"), found[name]
    assert (found["active"], found["task"]) == ("gave None", "gave None")


@pytest.mark.smoke
def test_node_has_files_and_broadcasts_and_refuses_the_rest_of_spark(
    spark_local: SparkSession, tmp_path: Path
) -> None:
    (tmp_path / "words.txt").write_text("a b")
    spark_local.sparkContext.addFile(str(tmp_path / "words.txt"))
    words = spark_local.sparkContext.broadcast(["a", "b"])
    args = {"words": words, "same": words}
    options: dict[str, Any] = {"framework": "plain", "feeding": Feeding(fed=False)}
    with sparkdl.launch(spark_local, try_all, args, nodes=1, **options) as cluster:
        (found,) = cluster.results(4 * SOON_S)
    check(found)
    assert found["file"] == "gave 'a b'"
    assert found["broadcast"] == "gave (['a', 'b'], True)"
    added = spark_local.sparkContext.accumulator(0)
    with pytest.raises(ConfigError, match=r"'rows' \(pyspark.accumulators.*return the number"):
        pickle_user_code(try_all, {"rows": added})
    words.destroy()


def test_node_without_a_task_of_spark_refuses_it_too() -> None:
    options: dict[str, Any] = {"startup": Startup(preload=["pyspark.sql"])}
    options |= {"feeding": Feeding(fed=False)}
    with launch_here(try_all, nodes=1, **options) as cluster:
        (found,) = cluster.results(2 * SOON_S)
    check(found)
    assert "executor='local' starts no task of Spark" in found["file"]
