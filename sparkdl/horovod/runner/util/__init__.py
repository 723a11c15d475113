"""Horovod's `runner.util`, of which `threads` is there.

Runs in: anywhere
"""
