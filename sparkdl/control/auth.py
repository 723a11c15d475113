"""The cluster's secret token: made once at the driver, wanted on every connection."""

from __future__ import annotations

import hmac
import secrets


def new_token() -> str:
    """Return 256 random bits as text that fits into a header."""
    return secrets.token_urlsafe(32)


def bearer(token: str) -> str:
    """Return the value of the `Authorization` header for `token` (RFC 6750)."""
    return f"Bearer {token}"


def is_authorized(header: str | None, token: str) -> bool:
    """Compare an `Authorization` header with the token, in constant time."""
    if header is None:
        return False
    given = header.encode(errors="surrogatepass")  # a header may hold any bytes
    return hmac.compare_digest(given, bearer(token).encode())
