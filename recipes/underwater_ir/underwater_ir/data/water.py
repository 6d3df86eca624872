"""Puts photographs under water: a simplified Jaffe-McGlamery model.

A camera sees the sum of the direct light, the forward-scattered light (a blurred direct part) and
the backscattered light (Jaffe, "Computer modeling and the design of optimal underwater imaging
systems", IEEE J. Oceanic Eng. 15(2), 1990; McGlamery 1980). For each channel c, in linear light, at
range z and a scene `depth` below the surface:

    I_c = N_c^depth * (blur(J_c, z) * N_c^z + veil_c * (1 - N_c^z))

The veiling light is scattering over attenuation, b / c_c with c_c = -ln N_c (Akkaynak, Treibitz, "A
revised underwater image formation model", CVPR 2018, equation 12); b is taken as equal for all
channels, so the veil has the water's colour.
"""

import math
from dataclasses import dataclass

import cv2
import numpy as np

# Share of light that is left after one metre, (R, G, B), in Jerlov's five oceanic and five coastal
# water types: Li, Anwar, Porikli, "Underwater scene prior inspired deep underwater image and video
# enhancement", Pattern Recognition 98, 2020.
TRANSMISSION_PER_M = {
    "I": (0.805, 0.961, 0.982),
    "IA": (0.804, 0.955, 0.975),
    "IB": (0.830, 0.950, 0.968),
    "II": (0.800, 0.925, 0.940),
    "III": (0.750, 0.885, 0.890),
    "1C": (0.750, 0.885, 0.875),
    "3C": (0.710, 0.820, 0.800),
    "5C": (0.670, 0.730, 0.670),
    "7C": (0.620, 0.610, 0.500),
    "9C": (0.550, 0.460, 0.290),
}
# The following are choices of this recipe.
# not 7C and 9C: they are brown, and no photograph of the test sets is
PHOTOGRAPHED = tuple(TRANSMISSION_PER_M)[:8]
GAMMA = 2.2  # of the photographs
# of the most absorbed channel along the range: photographers go near in turbid water
LARGEST_OPTICAL_DEPTH = 1.8
LONGEST_M = 8.0
# 18 m: the limit of a diver's first licence
LARGEST_OPTICAL_DEPTH_BELOW_SURFACE, DEEPEST_M = 4.0, 18.0
BLUR_PER_M = 0.0006  # sigma of the blur, as a share of the picture's width for each metre
BLUR_LEVELS = 4
MOST_GAIN = 4.0  # of the camera's exposure
NOISE = 0.008  # standard deviation of the sensor's noise, of the full scale


@dataclass(frozen=True)
class Water:
    """One dive: the water type, the scene's depth below the surface in metres, and the veiling
    light at the surface.
    """

    jerlov: str
    depth_m: float
    veil: float

    @property
    def transmission_per_m(self) -> np.ndarray:
        """(3,) float64, R, G, B."""
        return np.array(TRANSMISSION_PER_M[self.jerlov])

    @property
    def veil_colour(self) -> np.ndarray:
        """(3,) float64: `veil` in the channel that the water attenuates least,
        less in the others.
        """
        attenuation = -np.log(self.transmission_per_m)
        return np.asarray(self.veil * attenuation.min() / attenuation)


def reach_m(jerlov: str) -> tuple[float, float]:
    """Return the longest range and the largest depth below the surface at which pictures are
    simulated in a water type.
    """
    largest_attenuation = -math.log(min(TRANSMISSION_PER_M[jerlov]))
    return (
        min(LONGEST_M, LARGEST_OPTICAL_DEPTH / largest_attenuation),
        min(DEEPEST_M, LARGEST_OPTICAL_DEPTH_BELOW_SURFACE / largest_attenuation),
    )


def draw_water(rng: np.random.Generator) -> Water:
    """Draw a water type and how deep the scene lies."""
    jerlov = str(rng.choice(PHOTOGRAPHED))
    return Water(
        jerlov, float(rng.uniform(0.2, 1) * reach_m(jerlov)[1]), float(rng.uniform(0.3, 0.9))
    )


def draw_range_m(rng: np.random.Generator, height: int, width: int, longest_m: float) -> np.ndarray:
    """Return a scene's range (height, width) float32 in metres: farther towards one side, mostly
    the top, with bumps.
    """
    angle = rng.normal(0, 0.6)
    y, x = np.mgrid[0 : 1 : height * 1j, 0 : 1 : width * 1j]
    ramp = (1 - y) * math.cos(angle) + (x - 0.5) * math.sin(angle)
    bumps = cv2.resize(rng.normal(0, 0.25, (5, 5)), (width, height), interpolation=cv2.INTER_CUBIC)
    near_m, far_m = np.sort(rng.uniform(0.1, 1, 2)) * longest_m
    return (near_m + (far_m - near_m) * np.clip(ramp + bumps, 0, 1)).astype(np.float32)


def submerge(
    photo: np.ndarray, range_m: np.ndarray, water: Water, rng: np.random.Generator
) -> np.ndarray:
    """Return a photograph, RGB uint8 (H, W, 3), as it looks under water; `range_m` is float32 (H,
    W).
    """
    linear = (photo / np.float32(255)) ** np.float32(GAMMA)
    per_m = water.transmission_per_m.astype(np.float32)
    transmission = per_m ** range_m[..., None]  # (H, W, 3)
    veil = water.veil_colour.astype(np.float32) * (1 - transmission)
    seen = per_m**water.depth_m * (blur_by_range(linear, range_m) * transmission + veil)
    # The camera exposes for the same highlights as above the water.
    wanted, found = (float(np.percentile(light.max(2), 99)) for light in (linear, seen))
    exposed = seen * min(wanted / max(found, 1e-6), MOST_GAIN)
    encoded = np.clip(exposed, 0, 1) ** (1 / GAMMA)
    noisy = encoded + rng.normal(0, NOISE, encoded.shape)
    return (np.clip(noisy, 0, 1) * 255 + 0.5).astype(np.uint8)


def blur_by_range(linear: np.ndarray, range_m: np.ndarray) -> np.ndarray:
    """Blur each pixel of (H, W, 3) float32 the more, the farther it is: a Gaussian, interpolated
    between a few levels.
    """
    farthest_m = float(range_m.max())
    levels_m = np.linspace(0, farthest_m, BLUR_LEVELS)
    sigmas = levels_m[1:] * BLUR_PER_M * linear.shape[1]
    blurred = [linear, *(cv2.GaussianBlur(linear, (0, 0), max(sigma, 1e-3)) for sigma in sigmas)]
    place = range_m / max(farthest_m, 1e-6) * (BLUR_LEVELS - 1)
    weights = [np.clip(1 - np.abs(place - level), 0, 1)[..., None] for level in range(BLUR_LEVELS)]
    return np.asarray(sum(weight * level for weight, level in zip(weights, blurred, strict=True)))
