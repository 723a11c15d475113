"""`sparkdl doctor`: finds what would make a launch on this cluster fail, or slow.

Runs in: driver
"""
