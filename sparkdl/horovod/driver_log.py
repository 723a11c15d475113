"""Lines that a process sends to the driver: `log_to_driver`, and `LogCallback`'s for `fit`."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any

from sparkdl.node.error_lines import MARK


def log_to_driver(message: str) -> None:
    """Send a message from a process to the driver, which prints it.

    Where the driver prints all lines this is one of them, of the error output.
    """
    # On the standard output, whose lines are marked by no one else: see `mark_error_lines`.
    for line in str(message).splitlines() or [""]:
        sys.stdout.write(f"{MARK}{line}\n")
    sys.stdout.flush()


class Log:
    """Sends what `fit` reports to the driver: the metrics of each epoch.

    Args:
        per_batch_log: whether to send those of each batch, too.
    """

    def __init__(self, per_batch_log: bool = False) -> None:
        super().__init__()
        self._has_batches = per_batch_log
        self._began_s = 0.0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Send the number of the epoch, from 0."""
        self._began_s = time.monotonic()
        log_to_driver(f"Epoch {epoch} begins")

    def on_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Send the metrics, if asked to."""
        if self._has_batches:
            log_to_driver(f"Batch {batch}: {_metrics(logs)}")

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Send the metrics and the seconds."""
        took_s = time.monotonic() - self._began_s
        log_to_driver(f"Epoch {epoch} ended after {took_s:.1f} s: {_metrics(logs)}")


def _metrics(logs: Mapping[str, Any] | None) -> str:
    return ", ".join(f"{name}={float(value):.6g}" for name, value in (logs or {}).items())
