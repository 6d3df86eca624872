"""What the tests of figures share: class names, colours, and how to look at a picture."""

from typing import Any

import numpy as np
import pytest

NAMES = (
    "conductor",
    "other_wire",
    "pole",
    "crossarm",
    "insulator",
    "cutouts",
    "transformers",
    "background_structure",
)
ORANGE, BLUE = (230, 159, 0), (0, 114, 178)


def share_of(picture: np.ndarray, color: tuple[int, int, int]) -> float:
    return float((np.abs(picture.astype(int) - color).max(axis=-1) <= 12).mean())


def spoken_texts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collect what charts write, as matplotlib draws it."""
    from matplotlib.text import Text

    texts: list[str] = []
    draw = Text.draw

    def note(self: Text, renderer: Any) -> None:
        texts.append(self.get_text())
        draw(self, renderer)

    monkeypatch.setattr(Text, "draw", note)
    return texts
