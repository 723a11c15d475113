"""TensorFlowOnSpark's face: its modules under its own names, over sparkdl.

Runs in: driver

`sed s/tensorflowonspark/sparkdl.tfos/` is the whole migration of a program.
"""
