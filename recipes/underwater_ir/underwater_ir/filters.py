"""Grey world and CLAHE: filters that need no training."""

import cv2
import numpy as np

CLAHE_LIMIT, CLAHE_TILES = 2.0, (8, 8)  # OpenCV's tutorial values


def grey_world(image: np.ndarray) -> np.ndarray:
    """Balance the channels of RGB uint8 (H, W, 3) so that their means are equal."""
    means = image.mean((0, 1))
    return np.clip(image * (means.mean() / np.maximum(means, 1)), 0, 255).astype(np.uint8)


def clahe(image: np.ndarray, share: float = 1.0) -> np.ndarray:
    """Equalise the lightness of RGB uint8 (H, W, 3) in tiles (Zuiderveld, Graphics Gems IV, 1994).

    With a `share` below 1 the result is mixed with the picture.
    """
    lab = cv2.cvtColor(image, cv2.COLOR_RGB2LAB)
    lab[..., 0] = cv2.createCLAHE(CLAHE_LIMIT, CLAHE_TILES).apply(np.ascontiguousarray(lab[..., 0]))
    return cv2.addWeighted(cv2.cvtColor(lab, cv2.COLOR_LAB2RGB), share, image, 1 - share, 0)
