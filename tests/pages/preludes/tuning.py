"""The library of the search, and what its trials reach.

Runs in: the driver of a page's program
"""

import optuna

accuracy = 0.5
