"""Objects exchanged by members: pickled, and sealed.

They cross unauthenticated connections. They therefore carry an HMAC (RFC 2104, SHA-256); its key
came over the driver's authenticated connections, and nothing without it is unpickled.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Any

import cloudpickle

from sparkdl.core.errors import CollectiveError

_SEAL_NBYTES = hashlib.sha256().digest_size


def sealed(value: Any, key: bytes) -> bytes:
    """Return the seal and the pickled value."""
    data: bytes = cloudpickle.dumps(value)
    return hmac.digest(key, data, "sha256") + data


def open_sealed(data: bytes, key: bytes) -> Any:
    """Return the value.

    Raises:
        CollectiveError: if it was sealed with another key.
    """
    seal, body = data[:_SEAL_NBYTES], data[_SEAL_NBYTES:]
    if not hmac.compare_digest(seal, hmac.digest(key, body, "sha256")):
        raise CollectiveError(
            "received an object that no member of this group has sent: its seal is not the "
            "group's. Another program connects to the ports of this training"
        )
    return cloudpickle.loads(body)
