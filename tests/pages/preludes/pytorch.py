"""What TorchDistributor runs: a function, and a file.

Runs in: the driver of a page's program
"""

from pathlib import Path

Path("train.py").write_text("import sys\nassert sys.argv[1:] == ['--lr=0.001']\n")
