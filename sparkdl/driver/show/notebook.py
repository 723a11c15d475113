"""How a cluster shows itself in a notebook: a table that lives as long as the cluster.

Runs in: driver
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable

from sparkdl.core.deadline import Deadline
from sparkdl.driver.controller import Controller
from sparkdl.driver.lifecycle.state import Stopped

_log = logging.getLogger(__name__)

_PERIOD_S = 0.5


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


class LiveTable:
    """Shows what `render` returns, wherever it is asked to, and keeps it up to date.

    Args:
        render: returns the cluster by MIME type: `text/html`, `text/plain`.
    """

    def __init__(self, controller: Controller, render: Callable[[], dict[str, str]]) -> None:
        self._controller = controller
        self._render = render
        self._display_id = f"sparkdl-{controller.spec.cluster_id}"
        self._thread: threading.Thread | None = None

    def show(self) -> None:
        """Show it in the cell that runs.

        Raises:
            NotImplementedError: outside of a notebook; IPython prints the repr then.
        """
        if not in_notebook():
            raise NotImplementedError
        from IPython.display import display

        display(self._render(), raw=True, display_id=self._display_id)
        if self._thread is None:
            self._thread = threading.Thread(target=self._follow, name=self._display_id, daemon=True)
            self._thread.start()

    def _follow(self) -> None:
        """Update all that is shown, twice a second at most, until the cluster has ended."""
        from IPython.display import update_display

        shown, has_ended = None, False
        while not has_ended:
            has_ended = self._controller.wait_for(
                lambda view: isinstance(view.state, Stopped), Deadline.after(_PERIOD_S)
            )
            try:
                now = self._render()
                if now != shown:
                    update_display(now, raw=True, display_id=self._display_id)
                shown = now
            except Exception:  # noqa: BLE001 (the front end's; the training goes on without it)
                _log.debug("The table of the cluster is not updated any more", exc_info=True)
                return
