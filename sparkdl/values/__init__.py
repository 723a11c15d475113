"""Values: rows of Python become Arrow columns and come back; Arrow columns become numpy arrays.

Runs in: anywhere
"""
