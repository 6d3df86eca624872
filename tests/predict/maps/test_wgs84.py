from __future__ import annotations

import numpy as np
import pytest

from utils.predict.maps.wgs84 import geocentric, moved, offsets_m

A, F = 6378137.0, 1 / 298.257223563


def radii_m(latitude_deg: float) -> tuple[float, float]:
    """Return the radii of curvature along the meridian and across it."""
    e2 = F * (2 - F)
    root = np.sqrt(1 - e2 * np.sin(np.radians(latitude_deg)) ** 2)
    return A * (1 - e2) / root**3, A / root


@pytest.mark.parametrize("latitude", [0.0, 30.0, -47.5, 71.0])
def test_a_hundred_metres_are_the_degrees_that_the_radii_of_curvature_give(latitude: float) -> None:
    meridian, normal = radii_m(latitude)
    there = moved(latitude, 8.0, np.array([100.0, -60.0]))
    assert np.radians(there[0] - latitude) * meridian == pytest.approx(100, abs=0.01)
    assert np.radians(there[1] - 8.0) * normal * np.cos(np.radians(latitude)) == pytest.approx(-60, abs=0.01)


@pytest.mark.parametrize(
    "place", [(12.0, 179.9999), (-12.0, -179.9999), (89.9999, 50.0), (-89.9999, -3.0), (90.0, 0.0)]
)
def test_points_beyond_the_180th_meridian_and_the_poles_are_where_they_belong(place: tuple[float, float]) -> None:
    for offset in (np.array([30.0, 40.0]), np.array([-200.0, 90.0]), np.array([0.0, -50.0])):
        latitude, longitude = moved(*place, offset)
        assert -180 <= longitude <= 180
        back = offsets_m(*place, geocentric(np.array([latitude]), np.array([longitude])))
        assert back[0] == pytest.approx(offset, abs=1e-3)


def test_east_of_the_180th_meridian_the_longitude_is_negative() -> None:
    assert moved(12.0, 179.9999, np.array([0.0, 40.0]))[1] == pytest.approx(-179.99973, abs=1e-5)
