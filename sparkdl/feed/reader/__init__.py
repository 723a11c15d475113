"""The reading end of a feed in the child: what has arrived, epochs, batches, shuffling.

Runs in: child
"""
