"""The reading end of a feed in the child: arrived segments, epochs, batches, shuffling.

Runs in: child
"""
