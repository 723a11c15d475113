"""`HorovodRunner` of Databricks, which is `horovod.run` here and `horovod.spark.run` on Spark."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

import sparkdl
from sparkdl.core.errors import ConfigError
from sparkdl.horovod.keras.callbacks import Log
from sparkdl.horovod.spark import run_elastic
from sparkdl.node.error_lines import MARK, unmarked

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def place(base: int) -> tuple[int, int, int]:
    import sys

    from sparkdl.horovod import log_to_driver
    from sparkdl.horovod.spark.task import get_available_devices
    from sparkdl.node.context import current

    assert isinstance(get_available_devices(), list)
    ctx = current()
    assert ctx is not None
    print("said on", ctx.rank)
    print("an error line", file=sys.stderr)
    log_to_driver(f"first of {ctx.rank}\nsecond")
    return ctx.rank, base + ctx.num_workers, os.getpid()


def test_processes_of_this_machine_print_all_and_the_first_ones_value_is_returned(
    capfd: pytest.CaptureFixture[str],
) -> None:
    rank, found, pid = sparkdl.HorovodRunner(np=-2).run(place, base=5)
    assert (rank, found) == (0, 7)
    assert pid != os.getpid()
    out, err = capfd.readouterr()
    for rank in (0, 1):
        assert f"[{rank}]<stdout>:said on {rank}\n" in out
        assert f"[{rank}]<stderr>:first of {rank}\n[{rank}]<stderr>:second\n" in err


@pytest.mark.smoke
@pytest.mark.parametrize(
    "verbosity", ["log_callback_only", pytest.param("all", marks=pytest.mark.deep)]
)
def test_processes_on_spark_print_messages_alone_unless_all_is_asked_for(
    spark_local: SparkSession, capfd: pytest.CaptureFixture[str], verbosity: Any
) -> None:
    runner = sparkdl.HorovodRunner(np=2, driver_log_verbosity=verbosity)
    assert runner.run(place, base=5)[:2] == (0, 7)
    out, err = capfd.readouterr()
    lines = [line for line in out.splitlines() if "said" in line or "of" in line or "sec" in line]
    if verbosity == "all":
        assert {"[0]<stdout>:said on 0", "[1]<stdout>:said on 1"} <= set(lines)
        assert "[1]<stderr>:first of 1" in err.splitlines()
    else:
        assert sorted(lines) == ["first of 0", "first of 1", "second", "second"]
        assert "error line" not in out + err


def test_run_without_a_session_says_so() -> None:
    with pytest.raises(ConfigError, match="no active SparkSession"):
        run_elastic(print, num_proc=2)


def test_log_callback_sends_epochs_and_batches(capsys: pytest.CaptureFixture[str]) -> None:
    for per_batch, lines in ((False, 2), (True, 3)):
        callback = Log(per_batch_log=per_batch)
        callback.on_epoch_begin(0)
        callback.on_batch_end(0, {"loss": 0.5})
        callback.on_epoch_end(0, {"loss": 0.25, "mae": 1})
        said = capsys.readouterr().out.splitlines()
        assert len(said) == lines
        assert all(line.startswith(MARK) for line in said)
        assert unmarked(said[0]) == "Epoch 0 begins"
        assert unmarked(said[-1]).startswith("Epoch 0 ended after 0.")
        assert unmarked(said[-1]).endswith("loss=0.25, mae=1")
    assert unmarked(said[1]) == "Batch 0: loss=0.5"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"np": 1.5}, "np=1.5: must be a whole number"),
        ({"np": True}, "np=True: must be"),
        (
            {"np": 2, "driver_log_verbosity": "al"},
            r"driver_log_verbosity='al': must be one of .*'all'",
        ),
    ],
)
def test_bad_arguments_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        sparkdl.HorovodRunner(**options)
