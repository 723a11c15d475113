"""Makes the folder that the doctor is asked about."""

from pathlib import Path

Path("s3://bucket/train").mkdir(parents=True)
