"""Picture quality: PSNR and SSIM against a reference; UIQM and UCIQE, made for underwater pictures,
without one.
"""

import math

import cv2
import numpy as np
import torch
from torch.nn import functional

# Wang et al., "Image quality assessment", IEEE Trans. Image Processing 13(4), 2004
SSIM_WINDOW, SSIM_SIGMA = 11, 1.5
SSIM_C1, SSIM_C2 = 0.01**2, 0.03**2
PERFECT_PSNR_DB = 100.0  # for a mean squared error of at most 1e-10
# Panetta, Gao, Agaian, "Human-visual-system-inspired underwater image quality measures", IEEE J.
# Oceanic Eng. 41(3), 2016
UIQM_WEIGHTS = (0.0282, 0.2953, 3.5753)  # of colourfulness, sharpness and contrast
UICM_WEIGHTS = (-0.0268, 0.1586)
TRIMMED = 0.1  # share of the smallest and of the largest values that the mean leaves out
LUMA = (0.299, 0.587, 0.114)  # ITU-R BT.601, as the paper says
# In the program that publications use: Evaluation/uqim_utils.py of xahidbuffon/FUnIE-GAN
USUAL_LUMA = (0.299, 0.587, 0.144)
BLOCK_PX = 10
# Yang, Sowmya, "An underwater color image quality evaluation metric", IEEE Trans. Image Processing
# 24(12), 2015
UCIQE_WEIGHTS = (0.4680, 0.2745, 0.2576)


def psnr_db(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return the peak signal-to-noise ratio (B,) of pictures (B, C, H, W) in [0, 1]."""
    error = (first - second).double().square().mean((1, 2, 3))
    return torch.where(error <= 1e-10, PERFECT_PSNR_DB, -10 * error.clamp_min(1e-12).log10())


def ssim(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return the structural similarity (B,) of pictures (B, C, H, W) in [0, 1], at least 11 pixels
    a side.

    Gaussian window with sigma 1.5; only windows that lie inside the picture count, as in the
    paper's own program.
    """
    channels = first.shape[1]
    steps = torch.arange(SSIM_WINDOW, dtype=first.dtype, device=first.device) - SSIM_WINDOW // 2
    line = torch.exp(-(steps**2) / (2 * SSIM_SIGMA**2))
    line = line / line.sum()
    rows, columns = line.view(1, 1, -1, 1), line.view(1, 1, 1, -1)

    def local_mean(values: torch.Tensor) -> torch.Tensor:
        count = values.shape[1]
        values = functional.conv2d(values, rows.expand(count, 1, -1, -1), groups=count)
        return functional.conv2d(values, columns.expand(count, 1, -1, -1), groups=count)

    parts = local_mean(
        torch.cat([first, second, first * first, second * second, first * second], 1)
    )
    mean1, mean2, square1, square2, product = parts.split(channels, 1)
    variance1, variance2 = (square1 - mean1**2).clamp_min(0), (square2 - mean2**2).clamp_min(0)
    covariance = product - mean1 * mean2
    similarity = (2 * mean1 * mean2 + SSIM_C1) * (2 * covariance + SSIM_C2)
    similarity = similarity / ((mean1**2 + mean2**2 + SSIM_C1) * (variance1 + variance2 + SSIM_C2))
    return similarity.mean((1, 2, 3))


def uiqm(image: np.ndarray, as_in_paper: bool = False) -> float:
    """Return UIQM of a picture, RGB uint8 (H, W, 3), at least 10 pixels a side.

    Without `as_in_paper` blue weighs 0.144 in the sharpness, as in the program that publications
    use: 2 to 3 % more.
    """
    pixels = image.astype(np.float64)
    colour, sharp, contrast = UIQM_WEIGHTS
    sharpness = _sharpness(pixels, LUMA if as_in_paper else USUAL_LUMA)
    return colour * _colourfulness(pixels) + sharp * sharpness + contrast * _contrast(pixels)


def uciqe(image: np.ndarray, as_in_paper: bool = False) -> float:
    """Return UCIQE of a picture, RGB uint8 (H, W, 3). L, a and b of CIELab are scaled to 8 bits and
    divided by 255.

    The default is what the program that publications use computes (JOU-UIP/UCIQE on GitHub), mostly
    0.4 to 0.7. It leaves the offset of 128 in a and b, its deviation of chroma is relative, and its
    contrast is a share of the picture's range of L. With `as_in_paper` it is the paper's formula,
    mostly 0.2 to 0.4.
    """
    if as_in_paper:
        lab = cv2.cvtColor(image.astype(np.float32) / 255, cv2.COLOR_RGB2LAB) * np.array(
            (1 / 100, 1 / 255, 1 / 255)
        )
    else:
        lab = cv2.cvtColor(image, cv2.COLOR_RGB2LAB) / 255
    lightness, chroma = lab[..., 0], np.hypot(lab[..., 1], lab[..., 2])
    length = np.hypot(chroma, lightness)
    saturation = np.divide(chroma, length, out=np.zeros_like(chroma), where=length > 0)
    if as_in_paper:
        deviation, lightness_range = chroma.std(), 1.0
    else:
        deviation = np.sqrt(np.abs(1 - (chroma.mean() / chroma) ** 2).mean())
        lightness_range = max(float(np.ptp(lightness)), 1e-12)
    low, high = np.percentile(
        lightness, (1, 99), method="linear" if as_in_paper else "inverted_cdf"
    )
    spread, contrast, saturated = UCIQE_WEIGHTS
    return float(
        spread * deviation
        + contrast * (high - low) / lightness_range
        + saturated * saturation.mean()
    )


def _colourfulness(pixels: np.ndarray) -> float:
    red, green, blue = np.moveaxis(pixels, 2, 0)
    means, variances = zip(
        *(_trimmed(values) for values in (red - green, (red + green) / 2 - blue)), strict=True
    )
    return UICM_WEIGHTS[0] * math.hypot(*means) + UICM_WEIGHTS[1] * math.sqrt(sum(variances))


def _trimmed(values: np.ndarray) -> tuple[float, float]:
    """Return the mean without the smallest and the largest tenth, and the variance of all values
    about it.
    """
    flat = np.sort(values, axis=None)
    first, last = math.ceil(TRIMMED * flat.size), flat.size - math.floor(TRIMMED * flat.size)
    mean = float(flat[first:last].mean())
    return mean, float(((flat - mean) ** 2).mean())


def _sharpness(pixels: np.ndarray, weights: tuple[float, float, float]) -> float:
    total = 0.0
    for number, weight in enumerate(weights):
        channel = pixels[..., number]
        sides = [
            cv2.Sobel(channel, cv2.CV_64F, *order, borderType=cv2.BORDER_REFLECT)
            for order in ((1, 0), (0, 1))
        ]
        edges = np.hypot(*sides)
        edges *= 255 / max(float(edges.max()), 1e-12)
        low, high = _extremes(edges * channel)
        is_used = (low > 0) & (high > 0)
        ratio = np.divide(high, low, out=np.ones_like(high), where=is_used)
        total += weight * 2 * float(np.log(ratio).mean())
    return total


def _contrast(pixels: np.ndarray) -> float:
    low, high = _extremes(pixels)
    ratio = np.divide(high - low, high + low, out=np.zeros_like(high), where=high + low > 0)
    return -float(np.where(ratio > 0, ratio * np.log(np.where(ratio > 0, ratio, 1)), 0).mean())


def _extremes(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the smallest and the largest value of each whole block of 10 x 10 pixels (of all
    channels together).
    """
    rows, columns = values.shape[0] // BLOCK_PX, values.shape[1] // BLOCK_PX
    cut = values[: rows * BLOCK_PX, : columns * BLOCK_PX].reshape(
        rows, BLOCK_PX, columns, BLOCK_PX, -1
    )
    return cut.min((1, 3, 4)), cut.max((1, 3, 4))
