"""Task slots: placement of nodes, checks before a launch, and the queue for slots.

Runs in: driver
"""
