"""The errors that sparkdl raises, for `from sparkdl.errors import NodeFailedError`.

Runs in: anywhere
"""

from sparkdl.core.errors import *  # noqa: F403
