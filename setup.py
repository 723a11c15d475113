"""Packaging of sparkdl: what it is called, what it needs, what comes as an extra."""

import re
from pathlib import Path

from setuptools import find_packages, setup

_ROOT = Path(__file__).parent
_README = _ROOT / "README.md"
_VERSION = re.search(r'__version__ = "(.+)"', (_ROOT / "sparkdl/version.py").read_text())
assert _VERSION, "sparkdl/version.py holds no __version__"

_SPARK = ["pyspark>=3.5,<5"]
_CONNECT = ["pyspark[connect]>=4.0,<5"]
_DASHBOARD = ["bokeh>=3.8"]
_EXAMPLES = ["scikit-learn>=1.4"]
_MLFLOW = ["mlflow-skinny>=3.5"]
_TLS = ["cryptography>=42"]
_TUNING = ["optuna>=4"]


setup(
    name="sparkdl-cluster",
    version=_VERSION.group(1),
    description="Deep-learning clusters on the executors of a Spark cluster",
    long_description=_README.read_text(encoding="utf-8") if _README.exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=find_packages(include=["sparkdl", "sparkdl.*"]),
    package_data={"sparkdl": ["py.typed", "dashboard/page.html"]},
    install_requires=[
        "cloudpickle>=3",
        "google-crc32c>=1.5",
        "msgspec>=0.18.6",
        "numpy>=1.26,<3",
        "pandas>=2.2,<3",  # pyspark needs pandas, and warns about 3
        "protobuf>=4.22",
        "psutil>=5.9",
        "pyarrow>=18",  # with Flight, as all its wheels have
        "tqdm>=4.60",
        "websockets>=14",
    ],
    # A framework comes with Spark. Who has one, or only its client, installs the framework itself.
    extras_require={
        "spark": _SPARK,
        "client": ["pyspark-client>=4.0,<5"],
        "tensorflow": [*_SPARK, "tensorflow>=2.16"],
        "tensorflow-cpu": [*_SPARK, "tensorflow-cpu>=2.16"],
        "torch": [*_SPARK, "torch>=2.2", "lightning>=2.6"],
        "jax": [*_SPARK, 'jax>=0.8; python_version >= "3.11"'],
        "tuning": _TUNING,
        "gpu": ["nvidia-ml-py>=12"],
        "tls": _TLS,
        "dashboard": _DASHBOARD,
        "mlflow": _MLFLOW,
        "examples": _EXAMPLES,
        "dev": [
            *_CONNECT,
            *_DASHBOARD,
            *_EXAMPLES,
            *_MLFLOW,
            *_TLS,
            *_TUNING,
            "codespell",
            "flask",  # with flask-cors, what a tracking server of mlflow-skinny lacks
            "flask-cors",
            "hypothesis",
            "ipykernel",
            "kubernetes-validate",
            "matplotlib",
            'mkdocs-material; python_version >= "3.11"',
            'mkdocstrings[python]; python_version >= "3.11"',
            "mypy",
            "nbclient",
            "nvidia-ml-py",
            "playwright",
            "pre-commit",
            "pytest",
            "pytest-cov",
            "pytest-timeout",
            "pytest-xdist",
            "ruff",
            "tensorboard",
        ],
    },
    entry_points={"console_scripts": ["sparkdl = sparkdl.cli:main"]},
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
