"""What a program prints of a running cluster: whose output, and progress bars."""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from typing import Any

import psutil

from sparkdl.core.spec import Printing
from sparkdl.driver.options import Observe

_log = logging.getLogger(__name__)

_SUBMIT = "org.apache.spark.deploy.SparkSubmit"


def in_notebook() -> bool:
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


def has_audience() -> bool:
    """Whether a person reads what this program prints.

    True on a terminal, in a notebook, and where spark-submit runs the program in client mode and
    passes its output on.
    """
    return sys.stderr.isatty() or in_notebook() or is_submitted()


def printing(observe: Observe) -> Printing:
    """Return the nodes whose output this program prints, or hands to a function."""
    if observe.on_log is not None or observe.log_to_driver:
        return "all"
    return "first" if observe.log_to_driver is None and has_audience() else "none"


def is_submitted() -> bool:
    """Whether spark-submit runs this program, in client mode.

    The program's parent is then the JVM of spark-submit, which copies both streams of the program
    to its own standard output. The environment is no help: over Spark Connect it names no gateway,
    and in YARN's cluster mode it names one.
    """
    with suppress(psutil.Error):
        parent = psutil.Process().parent()
        return parent is not None and _SUBMIT in parent.cmdline()
    return False


class FeedBar:
    """A bar of rows read by the nodes; by default where there is a terminal or a notebook.

    `total` returns how many rows there are to read, 0 while that is unknown.
    """

    def __init__(
        self,
        feed: str,
        epochs: int,
        is_shown: bool | None,
        total: Callable[[], int] = lambda: 0,
        period_s: float = 0.25,
    ) -> None:
        self._period_s = period_s
        self._what = f"feed {feed!r}" + (f", {epochs} epochs" if epochs > 1 else "")
        self._is_asked = is_shown
        self._total = total
        self._bar: Any = None
        self._is_begun = False
        self._drawn_s = -math.inf
        self._logging = ExitStack()

    def __enter__(self) -> FeedBar:
        is_shown = self._is_asked
        if not (sys.stderr.isatty() or in_notebook() if is_shown is None else is_shown):
            return self
        from tqdm import tqdm
        from tqdm.contrib.logging import logging_redirect_tqdm

        self._bar = tqdm(
            desc=self._what,
            unit=" rows",
            total=self._total() or None,
            file=sys.stderr,
            dynamic_ncols=True,
        )
        self._logging.enter_context(logging_redirect_tqdm())
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
        self._logging.close()

    def update(self, rows_read: int, metrics: Mapping[str, float], is_last: bool = False) -> None:
        """Show how many rows have been read or are covered, and the first node's reports."""
        bar, now_s = self._bar, time.monotonic()
        if bar is None or (now_s - self._drawn_s < self._period_s and not is_last):
            return
        self._drawn_s = now_s
        total = self._total()
        bar.total = total or bar.total
        # The rate is that of the rows since the bar began, without those of an earlier run.
        bar.initial = min(bar.initial, rows_read) if self._is_begun else rows_read
        bar.n, self._is_begun = rows_read, True
        if metrics:
            bar.set_postfix(metrics, refresh=False)
        bar.refresh()


def print_beside(text: str) -> None:
    from tqdm import tqdm

    tqdm.write(text, file=sys.stdout)
    sys.stdout.flush()
