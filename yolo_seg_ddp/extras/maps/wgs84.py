"""Converts between WGS84 and the plane that touches the ellipsoid at the camera's position.

It uses geocentric coordinates, so the poles and the 180th meridian need no special case. Height
above the ellipsoid is assumed to be 0: at 2,000 m the error of a distance of 100 m is 3 cm.
Source of the formulas: IOGP Publication 373-7-2 (EPSG Guidance Note 7-2), methods 9602 and 9837.
"""

import numpy as np

SEMI_MAJOR_M = 6_378_137.0  # WGS84: EPSG ellipsoid 7030
FLATTENING = 1 / 298.257223563
SEMI_MINOR_M = SEMI_MAJOR_M * (1 - FLATTENING)
ECCENTRICITY_2 = FLATTENING * (2 - FLATTENING)
SECOND_ECCENTRICITY_2 = ECCENTRICITY_2 / (1 - ECCENTRICITY_2)


def geocentric(latitude_deg: np.ndarray | float, longitude_deg: np.ndarray | float) -> np.ndarray:
    """Return geocentric X, Y, Z in metres of points on the ellipsoid: float64 (..., 3)."""
    latitude, longitude = np.radians(latitude_deg), np.radians(longitude_deg)
    normal = SEMI_MAJOR_M / np.sqrt(1 - ECCENTRICITY_2 * np.sin(latitude) ** 2)
    from_axis = normal * np.cos(latitude)
    z = normal * (1 - ECCENTRICITY_2) * np.sin(latitude)
    return np.stack([from_axis * np.cos(longitude), from_axis * np.sin(longitude), z], axis=-1)


def _north_and_east(latitude_deg: float, longitude_deg: float) -> np.ndarray:
    """Return the unit vectors north and east at a position, geocentric: (2, 3)."""
    latitude, longitude = np.radians(latitude_deg), np.radians(longitude_deg)
    north = [
        -np.sin(latitude) * np.cos(longitude),
        -np.sin(latitude) * np.sin(longitude),
        np.cos(latitude),
    ]
    return np.array([north, [-np.sin(longitude), np.cos(longitude), 0.0]])


def moved(latitude_deg: float, longitude_deg: float, offset_m: np.ndarray) -> tuple[float, float]:
    """Return latitude and longitude (-180 to 180) of the point that lies `offset_m` (north, east)
    from a position.

    The way back from geocentric coordinates is Bowring's formula (Survey Review 23, 1976), whose
    error is below a micrometre near the ground.
    """
    x, y, z = geocentric(latitude_deg, longitude_deg) + offset_m @ _north_and_east(
        latitude_deg, longitude_deg
    )
    from_axis = np.hypot(x, y)
    reduced = np.arctan2(z * SEMI_MAJOR_M, from_axis * SEMI_MINOR_M)
    latitude = np.arctan2(
        z + SECOND_ECCENTRICITY_2 * SEMI_MINOR_M * np.sin(reduced) ** 3,
        from_axis - ECCENTRICITY_2 * SEMI_MAJOR_M * np.cos(reduced) ** 3,
    )
    return float(np.degrees(latitude)), float(np.degrees(np.arctan2(y, x)))


def offsets_m(latitude_deg: float, longitude_deg: float, points: np.ndarray) -> np.ndarray:
    """Return the distances of geocentric points (n, 3) to the north and east of a position, in
    metres: (n, 2).
    """
    return (points - geocentric(latitude_deg, longitude_deg)) @ _north_and_east(
        latitude_deg, longitude_deg
    ).T
