"""PyTorch Lightning on the nodes: its cluster environment, its data and its checkpoints.

Runs in: child

For `lightning` and for `pytorch_lightning`: whichever the program has imported. See
docs/lightning.md.
"""

from __future__ import annotations

from sparkdl.lightning.checkpoint import Checkpoint
from sparkdl.lightning.data import FeedDataModule
from sparkdl.lightning.environment import Environment

__all__ = ["Checkpoint", "Environment", "FeedDataModule"]
