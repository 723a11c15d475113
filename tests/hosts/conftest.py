"""What tests on several hosts share."""

from __future__ import annotations

from tests.hosts.bed import bed_of

bed = bed_of("h0", "h1", "h2")
"""Three hosts: h0 for the driver and Spark's master, h1 and h2 for workers."""
