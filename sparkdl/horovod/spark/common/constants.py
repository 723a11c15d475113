"""Horovod's constants; its reader had a buffer of so much memory on each host.

Runs in: anywhere

https://github.com/horovod/horovod/blob/v0.28.1/horovod/spark/common/constants.py
"""

TOTAL_BUFFER_MEMORY_CAP_GIB = 4
BYTES_PER_GIB = 1 << 30
