"""Horovod's `runner.common.util`, of which `env` is there.

Runs in: anywhere
"""
