"""The Crowd-BT quality scorer: learns one quality value per image from comparisons of pairs
(README.md).
"""

import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(PROJECT)] if str(PROJECT) not in sys.path else []
