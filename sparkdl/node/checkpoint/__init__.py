"""Checkpoints of a node: `ctx.checkpoint`, the folder, the storage below it, the manifest.

Runs in: child, agent
"""
