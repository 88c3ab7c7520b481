"""What pyproject.toml cannot say: the version is that of the `forerun` beside this folder.

It stands in one file of a checkout; in an sdist, in the metadata that were made of it.
"""

import re
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).parent
SDIST, CHECKOUT = HERE / "PKG-INFO", HERE.parent / "src/forerun/core/version.py"
VERSION = re.compile(r'^(?:Version: |__version__ = ")([\w.]+)', re.MULTILINE)

found = VERSION.search((SDIST if SDIST.exists() else CHECKOUT).read_text(encoding="utf-8"))
if found is None:
    raise ValueError("The version of forerun is not where it should be.")

setup(
    version=found[1],
    install_requires=[
        f"forerun=={found[1]}",
        "matplotlib>=3.9",  # curves of reports
        "numpy>=1.26",
        "rich>=13.7",
        "safetensors>=0.4.3",
        "tokenizers>=0.21",
        "torch>=2.9",
        "transformers>=5.0",
        "typer>=0.12",
    ],
)
