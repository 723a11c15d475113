"""Task slots: where nodes go, what is checked before, and the queue for them.

Runs in: driver
"""
