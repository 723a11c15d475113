"""The control plane: what agents and the coordinator say to each other, and how.

Runs in: anywhere
"""
