"""Horovod's `runner.common`, of which `util.env` is there.

Runs in: anywhere
"""
