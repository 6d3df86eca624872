"""Random colour: hue, saturation and value of a picture, each by one gain; on the loader's CPU or on the device.

The gains are drawn in either case by the loader, from the sample's own random numbers. The two ways differ by rounding:
OpenCV keeps whole levels between the steps, the device does not.
"""

from __future__ import annotations

import cv2
import numpy as np
import torch

from utils.augment import AugmentConfig

COLOUR_CHOICES = ("auto", "loader", "device")
HUES = 180  # steps of OpenCV's hue circle in 8 bits
MOST_HUE_GAIN = 255 / (HUES - 1)  # by which the last hue still fits into 8 bits


def draw_gains(config: AugmentConfig, rng: np.random.Generator) -> np.ndarray:
    """Draw the gains of hue, saturation and value: float64 (3,), 1 where the option is 0."""
    return 1 + rng.uniform(-1, 1, 3) * (config.hsv_h, config.hsv_s, config.hsv_v)


def jitter_colour(image: np.ndarray, gains: np.ndarray) -> np.ndarray:
    """Vary an RGB uint8 image (H, W, 3) by its gains (3,)."""
    if (gains == 1).all():
        return image
    hsv = cv2.cvtColor(image, cv2.COLOR_RGB2HSV)
    hue_gain, saturation_gain, value_gain = gains.tolist()
    if hue_gain > MOST_HUE_GAIN:
        circle = (np.arange(256) * hue_gain % HUES).astype(np.uint8)
        hsv[..., 0] = cv2.LUT(hsv[..., 0], circle)
        hue_gain = 1.0
    # Rounds and stops at 255, in a sixth of the time of a table for each channel; hues from 180 on begin anew.
    hsv = cv2.transform(hsv, np.diag([hue_gain, saturation_gain, value_gain]))
    return cv2.cvtColor(hsv, cv2.COLOR_HSV2RGB)


def jitter_colours(images: torch.Tensor, gains: torch.Tensor) -> torch.Tensor:
    """Vary RGB images float (B, 3, H, W) in 0..1 by their gains (B, 3), on their device; channels last."""
    hue_gain, saturation_gain, value_gain = gains.to(images.dtype).T[:, :, None, None, None]
    red, green, blue = images.split(1, dim=1)
    value = images.amax(1, keepdim=True)
    chroma = value - images.amin(1, keepdim=True)
    divisor = chroma.clamp(min=1e-6)
    # Sixths of the circle from red, by the largest channel (Smith 1978, "Color gamut transform pairs").
    from_red = ((green - blue) / divisor) % 6
    from_green, from_blue = (blue - red) / divisor + 2, (red - green) / divisor + 4
    hue = torch.where(value == red, from_red, torch.where(value == green, from_green, from_blue))
    hue = (hue * hue_gain) % 6
    saturation = (chroma / value.clamp(min=1e-6) * saturation_gain).clamp(max=1)
    value = (value * value_gain).clamp(max=1)
    steps = torch.tensor([5.0, 3.0, 1.0], device=images.device, dtype=images.dtype)[:, None, None]
    position = (steps + hue) % 6
    changed = value - value * saturation * torch.minimum(position, 4 - position).clamp(0, 1)
    return changed.contiguous(memory_format=torch.channels_last)
