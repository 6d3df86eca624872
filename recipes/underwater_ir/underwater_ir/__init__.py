"""Restores underwater pictures with a small network that learns from pseudo-labels.

The package makes the project's modules importable, so that its commands run from the recipe's
folder.
"""

import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(PROJECT)] if str(PROJECT) not in sys.path else []
