"""What loads where there is `pyspark-client` alone, and threads without a session."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest
from pyspark import SparkContext
from pyspark.sql import SparkSession

from sparkdl.core.errors import ConfigError
from sparkdl.driver.executors.sessions import inheriting_thread, is_rdd, session_of
from tests.doubles.programs import output_of

_CLIENT = """
import importlib, pkgutil, sys
sys.modules["py4j"] = sys.modules["pyspark.core"] = None  # which pyspark-client has not
import pyspark, sparkdl
assert not hasattr(pyspark, "SparkContext")
for module in pkgutil.walk_packages(sparkdl.__path__, "sparkdl."):
    if module.name not in ("sparkdl.__main__", "sparkdl.driver.executors.result_rdd"):
        try:
            importlib.import_module(module.name)
        except ImportError as error:
            if error.name is None or error.name.split(".")[0] in ("py4j", "pyspark"):
                print(f"{module.name}: {error}")
"""


@pytest.mark.smoke
def test_every_module_loads_without_py4j_and_the_classes_of_a_jvm() -> None:
    assert output_of(sys.executable, "-c", _CLIENT, timeout_s=120) == ""


def test_thread_needs_no_session() -> None:
    has_run = threading.Event()
    thread = inheriting_thread(None, has_run.set, "alone")
    thread.start()
    thread.join(10)
    assert (has_run.is_set(), thread.name, thread.daemon) == (True, "alone", True)


def test_session_or_context_that_was_stopped_is_refused_by_what_it_is() -> None:
    context: Any = object.__new__(SparkContext)
    spark: Any = object.__new__(SparkSession)
    context._jsc, spark._sc = None, context
    for stopped, name in ((spark, "SparkSession"), (context, "SparkContext")):
        with pytest.raises(ConfigError, match=f"the {name} has been stopped. Start another one"):
            session_of(stopped)


def test_a_frame_whose_columns_have_any_name_is_no_rdd() -> None:
    class Frame:
        def __getattr__(self, name: str) -> str:
            return name

    assert not is_rdd(Frame())
