"""The colours of classes."""

from __future__ import annotations

from tests.pages.drawn import BLUE, ORANGE
from utils.common.colors import class_color


def test_first_classes_have_the_colours_of_okabe_and_ito_and_more_classes_others() -> None:
    assert class_color(0) == ORANGE
    assert class_color(4) == BLUE
    assert len({class_color(index) for index in range(23)}) == 23  # white cannot get lighter
    assert all(0 <= value <= 255 for index in range(200) for value in class_color(index))
