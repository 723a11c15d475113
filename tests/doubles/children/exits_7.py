"""Ends with exit code 7."""

from __future__ import annotations

raise SystemExit(7)
