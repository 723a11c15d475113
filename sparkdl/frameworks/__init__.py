"""What each deep-learning framework needs to find its cluster: one file a framework.

Runs in: child, driver
"""
