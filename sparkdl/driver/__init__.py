"""The driver's half: launch, decide, perform, and the handle that the user holds.

Runs in: driver
"""
