"""What is fed to whom: calls, epochs, streams, and what of them a new generation is still to have.

Runs in: driver
"""
