"""`HorovodRunner` of Databricks: where its processes run, what it returns, what it prints."""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

import pytest

import sparkdl
from sparkdl.core.errors import ConfigError
from sparkdl.node.error_lines import MARK, unmarked

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def train(base: int) -> dict[str, Any]:
    import sys

    import torch

    import sparkdl.horovod.torch as hvd
    from sparkdl.horovod import log_to_driver

    hvd.init()
    total = hvd.allreduce(torch.tensor([base + hvd.rank()]), op=hvd.Sum)
    print("said on", hvd.rank())
    print("an error line", file=sys.stderr)
    log_to_driver(f"first of {hvd.rank()}\nsecond")
    return {"rank": hvd.rank(), "sum": int(total), "pid": os.getpid()}


def test_processes_of_this_machine_print_all_and_the_first_ones_value_is_returned(
    capfd: pytest.CaptureFixture[str],
) -> None:
    found = sparkdl.HorovodRunner(np=-2).run(train, base=5)
    assert (found["rank"], found["sum"]) == (0, 11)
    assert found["pid"] != os.getpid()
    out, err = capfd.readouterr()
    for rank in (0, 1):
        assert f"[{rank}]<stdout>:said on {rank}\n" in out
        assert f"[{rank}]<stderr>:first of {rank}\n[{rank}]<stderr>:second\n" in err


@pytest.mark.parametrize(
    "verbosity", ["log_callback_only", pytest.param("all", marks=pytest.mark.deep)]
)
def test_processes_on_spark_print_messages_alone_unless_all_is_asked_for(
    spark_local: SparkSession, capfd: pytest.CaptureFixture[str], verbosity: Any
) -> None:
    runner = sparkdl.HorovodRunner(np=2, driver_log_verbosity=verbosity)
    assert runner.run(train, base=1)["sum"] == 3
    out, err = capfd.readouterr()
    lines = [line for line in out.splitlines() if "said" in line or "of" in line or "sec" in line]
    if verbosity == "all":
        assert {"[0]<stdout>:said on 0", "[1]<stdout>:said on 1"} <= set(lines)
        assert "[1]<stderr>:first of 1" in err.splitlines()
    else:
        assert sorted(lines) == ["first of 0", "first of 1", "second", "second"]
        assert "error line" not in out + err


def test_log_callback_sends_epochs_and_batches(capsys: pytest.CaptureFixture[str]) -> None:
    import numpy as np
    import tensorflow as tf

    hvd: Any = import_module("sparkdl.horovod.tensorflow.keras")
    model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
    model.compile(loss="mse", optimizer="sgd")
    callback = hvd.LogCallback
    for per_batch, lines in ((False, 4), (True, 8)):
        rows = np.ones((4, 2), np.float32)
        model.fit(rows, rows, 2, epochs=2, verbose=0, callbacks=[callback(per_batch_log=per_batch)])
        said = capsys.readouterr().out.splitlines()
        assert len(said) == lines
        assert all(line.startswith(MARK) for line in said)
        assert unmarked(said[0]) == "Epoch 0 begins"
        assert unmarked(said[-1]).startswith("Epoch 1 ended after 0.")
        assert "loss=" in said[-1]


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
