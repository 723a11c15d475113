"""The version of sparkdl, in its one place.

Runs in: anywhere
"""

__version__ = "0.1.0"
