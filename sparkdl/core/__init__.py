"""The vocabulary every other room speaks: roles, specs, worlds, failures, errors, deadlines.

Runs in: anywhere. Standard library only.
"""
