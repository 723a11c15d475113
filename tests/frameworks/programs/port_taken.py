"""Starts a strategy of several workers on a port that is taken.

Usage: port_taken.py <result file>
"""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path

import tensorflow as tf

from sparkdl.frameworks.tensorflow import TensorFlow


def main(result: Path) -> None:
    """Write whether its error was taken for a lost port."""
    with socket.socket() as squatter:
        squatter.bind(("127.0.0.1", 0))
        squatter.listen()
        taken = f"127.0.0.1:{squatter.getsockname()[1]}"
        cluster = {"worker": [taken, "127.0.0.1:1"]}
        task = {"type": "worker", "index": 0}
        os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": task})
        try:
            tf.distribute.MultiWorkerMirroredStrategy()
        except tf.errors.UnknownError as error:
            result.write_text(json.dumps(TensorFlow().is_port_lost(error)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
