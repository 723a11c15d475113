"""What a cluster does, as pages in a browser: live, or of a recorded run.

The driver writes events (`events.py`) to a process of its own, which folds them into what is shown
(`history.py`, pure) and serves the pages (`server.py`, `pages.py`). Nothing of it runs in the
driver or the nodes, so that no fault of it is one of the training.

Runs in: driver, dashboard
"""
