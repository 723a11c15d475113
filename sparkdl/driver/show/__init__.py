"""What a user sees of a running cluster: a table, a notebook view, a progress bar.

Runs in: driver
"""
