"""Task slots: where nodes go, what is checked before, and who waits for room.

Runs in: driver
"""
