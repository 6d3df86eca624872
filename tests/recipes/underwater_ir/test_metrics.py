"""The metrics: PSNR and SSIM against scikit-image, UIQM and UCIQE against slow programs of their definitions."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from underwater_ir.metrics import psnr_db, ssim, uciqe, uiqm

from tests.recipes.underwater_ir.small import photograph

NEEDS = "needs the packages of the recipe (pip install -r recipes/underwater_ir/requirements.txt)"


def tensor_of(image: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(image.astype(np.float64) / 255).permute(2, 0, 1)[None]


def noisy(image: np.ndarray, seed: int) -> np.ndarray:
    noise = np.random.default_rng(seed).normal(0, 25, image.shape)
    return np.clip(image + noise, 0, 255).astype(np.uint8)


def test_psnr_and_ssim_are_those_of_scikit_image() -> None:
    metrics = pytest.importorskip("skimage.metrics", reason=NEEDS)
    clear = photograph(1, 40, 53)
    pairs = [(clear, noisy(clear, seed)) for seed in range(2)]
    first, second = (torch.cat([tensor_of(pair[side]) for pair in pairs]) for side in (0, 1))
    expected = [metrics.peak_signal_noise_ratio(*pair) for pair in pairs]
    assert psnr_db(first, second).tolist() == pytest.approx(expected, abs=1e-6)
    # skimage averages over channels and leaves out the same border of 5 pixels.
    options = {"gaussian_weights": True, "sigma": 1.5, "use_sample_covariance": False, "channel_axis": 2}
    expected = [metrics.structural_similarity(*pair, data_range=255, **options) for pair in pairs]
    assert ssim(first, second).tolist() == pytest.approx(expected, abs=1e-6)


def test_a_perfect_picture_has_100_db_and_similarity_1() -> None:
    picture = tensor_of(photograph(2))
    assert psnr_db(picture, picture).tolist() == [100.0]
    assert ssim(picture, picture).tolist() == pytest.approx([1.0])


def test_half_the_range_of_error_is_six_db() -> None:
    assert float(psnr_db(torch.zeros(1, 3, 8, 8), torch.full((1, 3, 8, 8), 0.5))) == pytest.approx(20 * math.log10(2))


def blocks_of(values: np.ndarray) -> list[np.ndarray]:
    rows, columns = values.shape[0] // 10, values.shape[1] // 10
    return [values[10 * r : 10 * r + 10, 10 * c : 10 * c + 10] for r in range(rows) for c in range(columns)]


def slow_uiqm(image: np.ndarray) -> float:
    """UIQM by loops, after Panetta et al. 2016, with SciPy's Sobel filter."""
    ndimage = pytest.importorskip("scipy.ndimage", reason=NEEDS)
    pixels = image.astype(float)
    parts = []
    for opponent in (pixels[..., 0] - pixels[..., 1], (pixels[..., 0] + pixels[..., 1]) / 2 - pixels[..., 2]):
        values = sorted(opponent.ravel())
        kept = values[math.ceil(0.1 * len(values)) : len(values) - math.floor(0.1 * len(values))]
        mean = sum(kept) / len(kept)
        parts.append((mean, sum((value - mean) ** 2 for value in values) / len(values)))
    colour = -0.0268 * math.sqrt(parts[0][0] ** 2 + parts[1][0] ** 2) + 0.1586 * math.sqrt(parts[0][1] + parts[1][1])
    sharp = 0.0
    for weight, channel in zip((0.299, 0.587, 0.114), np.moveaxis(pixels, 2, 0), strict=True):
        edges = np.hypot(ndimage.sobel(channel, 0), ndimage.sobel(channel, 1))
        blocks = blocks_of(edges * 255 / edges.max() * channel)
        logs = [math.log(block.max() / block.min()) for block in blocks if block.min() > 0]
        sharp += weight * 2 / len(blocks) * sum(logs)
    blocks = blocks_of(pixels)
    ratios = [(block.max() - block.min()) / (block.max() + block.min()) for block in blocks if block.max() > 0]
    contrast = -sum(ratio * math.log(ratio) for ratio in ratios if ratio > 0) / len(blocks)
    return 0.0282 * colour + 0.2953 * sharp + 3.5753 * contrast


def test_uiqm_is_its_definition_computed_slowly() -> None:
    image = noisy(photograph(3, 34, 47), 3)  # whole blocks only count: 3 x 4
    assert uiqm(image) == pytest.approx(slow_uiqm(image), rel=1e-9)
    assert uiqm(np.zeros((20, 20, 3), np.uint8)) == 0


def test_uciqe_is_its_definition_with_the_lab_of_scikit_image() -> None:
    color = pytest.importorskip("skimage.color", reason=NEEDS)
    image = photograph(4)
    lab = color.rgb2lab(image)
    lightness, chroma = lab[..., 0] / 100, np.hypot(lab[..., 1], lab[..., 2]) / 255
    low, high = np.percentile(lightness, (1, 99))
    saturation = np.mean(chroma / np.sqrt(chroma**2 + lightness**2))
    expected = 0.4680 * np.std(chroma) + 0.2745 * (high - low) + 0.2576 * saturation
    assert uciqe(image) == pytest.approx(expected, abs=1e-4)
    assert uciqe(np.full((20, 20, 3), 255, np.uint8)) == pytest.approx(0, abs=1e-3)
