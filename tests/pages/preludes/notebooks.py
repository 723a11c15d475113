"""The function of the notebook.

Runs in: the driver of a page's program
"""

train_fn = train
