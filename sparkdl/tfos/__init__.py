"""TensorFlowOnSpark's face: its modules under its own names, over sparkdl.

Runs in: anywhere

`sed s/tensorflowonspark/sparkdl.tfos/` is the whole migration of a program. `docs/migrating.md`
lists the differences.
"""

__version__ = "2.2.5"
"""The version of TensorFlowOnSpark whose surface this is."""
