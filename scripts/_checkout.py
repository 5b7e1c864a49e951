"""Lets the scripts find the package in a checkout that is not installed; import it first."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
