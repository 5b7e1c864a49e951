"""Lets the scripts find the package in a checkout that is not installed; import it first.

In an installed package, where they lie inside of it, there is nothing to do.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
IS_CHECKOUT = (ROOT / "pyproject.toml").is_file()

if IS_CHECKOUT:
    sys.path.insert(0, str(ROOT))
