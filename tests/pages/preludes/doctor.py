"""Makes the folder that the doctor is asked about.

Runs in: the driver of a page's program
"""

from pathlib import Path

Path("s3://bucket/train").mkdir(parents=True)
