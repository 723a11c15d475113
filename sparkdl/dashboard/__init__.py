"""The dashboard: pages in a browser that show a cluster live, or a recorded run.

The driver writes its events (`driver/events.py`) to a separate process, which folds them into
histories (`driver/history.py`, pure) and serves the pages (`server.py`, `pages.py`). Neither the
driver nor a node makes a page, so a fault in a page cannot harm the training.

Runs in: dashboard
"""
