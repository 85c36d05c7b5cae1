"""Puts the examples folder on the import path, as running one of its scripts does."""

import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"

if str(EXAMPLES) not in sys.path:
    sys.path.insert(0, str(EXAMPLES))
