"""`HorovodRunner` of Databricks' package sparkdl.

Runs in: driver

https://github.com/databricks/spark-deep-learning/blob/master/sparkdl/horovod/runner_base.py
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any, Literal

from sparkdl.core.errors import ConfigError
from sparkdl.core.texts import did_you_mean
from sparkdl.driver.options import LogLine, Observe
from sparkdl.horovod.runner import run as run_here
from sparkdl.horovod.spark.runner import run as run_on_spark

_log = logging.getLogger(__name__)
_VERBOSITIES = ("log_callback_only", "all")


class HorovodRunner:
    """Runs a function in several processes, on Spark or on the driver, joined by `hvd.init()`.

    Args:
        np: above zero, processes on Spark, each in a task slot; below zero, -np processes on this
            machine; 0, as many as there are task slots, with a warning.
        driver_log_verbosity: the lines of processes on Spark to print: only lines of
            `log_to_driver` and `LogCallback` (`log_callback_only`), or `all`. Processes on this
            machine always print all lines.
        options: of `sparkdl.horovod.spark.run`, by keyword: `num_gpus`, `env`, `start_timeout`, …

    Raises:
        ConfigError: for another `driver_log_verbosity`, or if `np` is no whole number.
    """

    def __init__(
        self,
        *,
        np: int,
        driver_log_verbosity: Literal["log_callback_only", "all"] = "log_callback_only",
        **options: Any,
    ) -> None:
        # A bool is an int to Python.
        if isinstance(np, bool) or not isinstance(np, int):
            raise ConfigError(f"np={np!r}: must be a whole number of processes")
        if driver_log_verbosity not in _VERBOSITIES:
            near = did_you_mean(str(driver_log_verbosity), _VERBOSITIES)
            raise ConfigError(
                f"driver_log_verbosity={driver_log_verbosity!r}: must be one of "
                f"{_VERBOSITIES}{near}"
            )
        self.num_processor = np
        self._is_quiet = np >= 0 and driver_log_verbosity != "all"
        self._options = options

    def run(self, main: Callable[..., Any], **kwargs: Any) -> Any:
        """Call `main(**kwargs)` in each process, and return the value of rank 0.

        Raises:
            ConfigError: if it cannot work: more processes than task slots, for example.
            NodeFailedError: if a process failed; a RuntimeError.
        """
        options = dict(self._options)
        if self._is_quiet:
            options = {"verbose": 0, "observe": Observe(on_log=_print_messages), **options}
        if self.num_processor < 0:
            return run_here(main, kwargs=kwargs, num_proc=-self.num_processor, **options)[0]
        if self.num_processor == 0:
            _log.warning("np=0 takes all task slots; say how many processes: HorovodRunner(np=…)")
        return run_on_spark(main, kwargs=kwargs, num_proc=self.num_processor or None, **options)[0]


def _print_messages(line: LogLine) -> None:
    if line.is_error:  # no other line is marked: see `run(verbose=0)`
        sys.stdout.write(f"{line.text}\n")
        sys.stdout.flush()
