"""The errors that sparkdl raises, for `from sparkdl.errors import NodeFailedError`.

Runs in: anywhere
"""

from sparkdl.core.errors import *  # noqa: F403

del in_words, node_error, page_of  # noqa: F821 (what makes their texts)
