"""What would go wrong with a launch on this cluster, and what it would cost: `sparkdl doctor`.

Runs in: driver, feeder
"""
