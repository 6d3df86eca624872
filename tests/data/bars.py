"""Seven small photographs of two bars each, shared by the tests of the data set and its loader."""

from __future__ import annotations

import numpy as np

SIZE_PX = 64
SHAPES = [(48, 64), (64, 40), (96, 128), (64, 64), (30, 90), (50, 50), (80, 60)]
COLOURS = [(250, 20, 20), (20, 250, 20)]
BARS = [
    np.array([[0.1, 0.2], [0.6, 0.2], [0.6, 0.5], [0.1, 0.5]]),
    np.array([[0.3, 0.6], [0.9, 0.6], [0.9, 0.9], [0.3, 0.9]]),
]
