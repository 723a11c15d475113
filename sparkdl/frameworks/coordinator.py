"""What TensorFlow's `ClusterCoordinator`, and `fit` of tf_keras, lack for workers with rows.

Runs in: child

The coordinator gives a step to any worker that is free, and takes all workers' data for the same.
The first error of a step cancels all others. `apply_shim` changes:

- a worker that has no row for a step fails it with a `CancelledError` that says `NO_ROW_MARK`. The
  coordinator takes that for a passing trouble and puts the step back into its queue, stock; now it
  waits a moment, so that another worker takes the step. It is not logged as an error;
- `fit` and `evaluate` of tf_keras fetch the result of the last step that they have scheduled. At
  the end of the data that one has none, and they raised its error instead of ending.
"""

from __future__ import annotations

import logging
import sys
import threading
from typing import Any

from sparkdl.core.errors import FrameworkMissingError
from sparkdl.core.patch import Function, Patch

_log = logging.getLogger(__name__)

NO_ROW_MARK = "/job:worker of sparkdl has no row"
"""Is in the error of a step that has no row; the coordinator looks for its first word."""

_PAUSE_S = 0.05
_COORDINATOR = "tensorflow.python.distribute.coordinator.cluster_coordinator"


class _Steps:
    """Counts the steps that have been done."""

    done = 0
    done_before = 0

    def finished(self, stock: Function, *args: Any) -> None:
        stock(*args)
        self.done += 1

    def synced(self, stock: Function, logs: Any) -> Any:
        """Return the results of a step; without them what lets `fit` take those of its metrics."""
        import tensorflow as tf

        remote = tf.distribute.experimental.coordinator.RemoteValue
        has_done, self.done_before = self.done > self.done_before, self.done
        try:
            return stock(logs)
        except (tf.errors.OutOfRangeError, tf.errors.CancelledError):
            spec = getattr(logs, "_type_spec", None)
            if not isinstance(logs, remote) or not isinstance(spec, dict):
                raise
            # No step of the epoch was done: nothing is known, where metrics would say 0.
            return dict.fromkeys(spec, float("nan")) if has_done else {}


def apply_shim() -> None:
    """Make the imported TensorFlow train on workers that have rows. Again changes nothing.

    Raises:
        FrameworkMissingError: if it is not known.
    """
    import tensorflow as tf

    for patch in _PATCHES:
        if objection := patch.objection():
            raise FrameworkMissingError(
                f"TensorFlow {tf.__version__} cannot feed workers of parameter servers: "
                f"{objection}. Install TensorFlow 2.21, which sparkdl knows"
            )
        patch.apply()
    tf.get_logger().addFilter(_is_worth_logging)


def let_fit_end() -> None:
    """Do the same to tf_keras, if it is used. Without it `fit` ends with an `OutOfRangeError`."""
    if "tf_keras" not in sys.modules:
        return
    if objection := _FIT.objection():
        _log.warning("fit will raise OutOfRangeError at the end of the feed: %s", objection)
    else:
        _FIT.apply()


def _put_back(stock: Function, *args: Any) -> None:
    stock(*args)
    threading.Event().wait(_PAUSE_S)


def _is_worth_logging(record: logging.LogRecord) -> bool:
    return NO_ROW_MARK not in record.getMessage()


_STEPS = _Steps()
_PATCHES = (
    Patch(f"{_COORDINATOR}:_CoordinatedClosureQueue.put_back", ("self", "closure"), _put_back),
    Patch(f"{_COORDINATOR}:_CoordinatedClosureQueue.mark_finished", ("self",), _STEPS.finished),
)
_FIT = Patch(
    "tf_keras.src.utils.tf_utils:sync_to_numpy_or_python_type", ("tensors",), _STEPS.synced
)
