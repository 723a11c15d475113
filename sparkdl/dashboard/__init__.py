"""What a cluster does, as pages in a browser: live, or of a recorded run.

The driver writes its events (`driver/events.py`) to a process of its own, which folds them into
what is shown (`driver/history.py`, pure) and serves the pages (`server.py`, `pages.py`). No page
is made in the driver or the nodes, so that no fault of one is a fault of the training.

Runs in: driver, dashboard
"""
