"""Whether masks are compared in the photographs' pixels, where the user leaves it open."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from evaluate_model import EvaluationConfig, choose_resolution

WINDOWS = {"per_photo": 8, "low_scale": 0.5, "high_scale": 1.0}


@pytest.mark.parametrize(
    ("windows", "options", "resolution"),
    [
        (None, {}, "proto"),
        (WINDOWS, {}, "native"),
        (WINDOWS, {"tiles": "off"}, "proto"),
        (WINDOWS, {"mask_resolution": "proto"}, "proto"),
        (None, {"mask_resolution": "native"}, "native"),
        (None, {"tiles": "640"}, "native"),
        (None, {"thin_classes": ("wire",)}, "native"),
        (None, {"centreline_tolerance": 5.0}, "native"),
    ],
)
def test_masks_are_compared_in_photograph_pixels_after_windows_and_where_an_option_asks(
    windows: dict[str, float] | None, options: dict[str, Any], resolution: str
) -> None:
    other, model = (SimpleNamespace(args={"windows": facts}) for facts in (None, windows))
    config = EvaluationConfig(model="a.pt", compare="b.pt", **options)
    assert choose_resolution(config, [other, model]).mask_resolution == resolution  # type: ignore[list-item]
