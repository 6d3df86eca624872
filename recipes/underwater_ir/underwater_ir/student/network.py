"""The students: `Student`, a three-level U-Net of blocks that work on Haar wavelets and are guided
by the pseudo-label, and `Curves`, which chooses one colour curve for each picture.

Attention is between channels, not between pixels (as in Zamir et al., "Restormer", arXiv
2111.09881): its memory grows with the number of pixels, not with their square. At 256 pixels full
attention between 128 x 128 positions would need 12 GiB for each picture and block.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from yolo_seg_ddp.utils.errors import UserError
from yolo_seg_ddp.utils.tensor_files import read_tensors

HEADS = 12  # of the attention on the 3 high-frequency bands
CROSS_HEADS = 4  # of the attention between low and high bands: widths are multiples of it
SQUEEZE = 8  # reduction of the squeeze-and-excitation gate
HEAD_WIDTH = 256  # of the degradation classifier
SIZE_MULTIPLE = 8  # two halvings of the U-Net, and one of the wavelet
EPSILON = 1e-5
SEEN_PX, CURVES_WIDTH = 64, 64  # of `Curves`


@dataclass(frozen=True)
class Outputs:
    """The student's outputs for a batch."""

    picture: torch.Tensor  # (B, 3, H, W); in [0, 1] in evaluation
    # (B, 1, H/2, W/2), the last block's share of the high frequencies; None: it has no blocks
    gate: torch.Tensor | None
    degradation: torch.Tensor  # (B, K) logits
    text: torch.Tensor | None  # (B, D), for the comparison with text embeddings


class Network(nn.Module):
    """What both students are: `label_shape` is a label's shape (`Label.shape`).

    `recompute` saves memory in the training of `Student`: the inside of each block is computed
    again in the backward pass.
    """

    label_shape: tuple[int, int, int, int]
    recompute = False

    @classmethod
    def sizes_of(cls, weights: Mapping[str, torch.Tensor]) -> tuple[int, ...]:
        """Return the constructor's arguments, without text_dim, that a state dict belongs to."""
        raise NotImplementedError

    @classmethod
    def from_weights(cls, weights: Mapping[str, torch.Tensor], source: str) -> Network:
        """Return the network that a state dict belongs to, in evaluation mode.

        Raises UserError that names `source`.
        """
        try:
            text_dim = weights["text.weight"].shape[0] if "text.weight" in weights else 0
            network = cls(*cls.sizes_of(weights), text_dim)
            network.load_state_dict(dict(weights))
        except (KeyError, AttributeError, IndexError, RuntimeError, ValueError, TypeError) as error:
            raise UserError(
                f"{source}: not weights of this network; give the file that training wrote to "
                "--save-path"
            ) from error
        return network.eval()


class Student(Network):
    """Restores pictures. `num_masks`, `cond_dim`, `num_kinds` and `text_dim` are a label's shape
    (`Label.shape`).
    """

    def __init__(
        self, width: int, num_masks: int, cond_dim: int, num_kinds: int, text_dim: int = 0
    ) -> None:
        super().__init__()
        self.label_shape = (num_masks, cond_dim, num_kinds, text_dim)
        widths = [width, 2 * width, 4 * width]
        facts = (cond_dim, num_masks)
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.encoder = nn.ModuleList(
            [nn.ModuleList([Block(c, *facts) for _ in range(2)]) for c in widths[:2]]
        )
        self.down = nn.ModuleList([nn.Conv2d(c, 2 * c, 2, stride=2) for c in widths[:2]])
        self.bottleneck = nn.ModuleList([Block(widths[2], *facts) for _ in range(2)])
        self.up = nn.ModuleList([nn.ConvTranspose2d(2 * c, c, 2, stride=2) for c in widths[:2]])
        self.merge = nn.ModuleList([nn.Conv2d(2 * c, c, 1) for c in widths[:2]])
        self.decoder = nn.ModuleList(
            [nn.ModuleList([Block(c, *facts) for _ in range(2)]) for c in widths[:2]]
        )
        self.norm = ModulatedNorm(width, cond_dim)
        self.head = nn.Conv2d(width, 3, 3, padding=1)
        self.classifier = nn.Sequential(
            nn.Linear(widths[2], HEAD_WIDTH), nn.GELU(), nn.Linear(HEAD_WIDTH, num_kinds)
        )
        self.text = nn.Linear(widths[2], text_dim) if text_dim else None
        nn.init.zeros_(self.head.weight)  # the untrained student returns its input
        nn.init.zeros_(self.head.bias)  # type: ignore[arg-type] # it has a bias

    def forward(self, inputs: dict[str, torch.Tensor]) -> Outputs:
        """Restore `picture` (B, 3, H, W), sides a multiple of 8, with its `masks` (B, M, h, w) and
        `z_d` (B, C).
        """
        picture, guide = inputs["picture"], (inputs["z_d"], inputs["masks"])
        features, skips, gate = self.stem(picture), [], picture
        for blocks, down in zip(self.encoder, self.down, strict=True):
            features, gate = self._run(blocks, features, guide)
            skips.append(features)
            features = down(features)
        features, gate = self._run(self.bottleneck, features, guide)
        pooled = features.mean((2, 3))
        for level in (1, 0):
            features = self.merge[level](torch.cat([self.up[level](features), skips[level]], 1))
            features, gate = self._run(self.decoder[level], features, guide)
        restored = picture + self.head(self.norm(features, inputs["z_d"]))
        return Outputs(
            restored if self.training else restored.clamp(0, 1),
            gate,
            self.classifier(pooled),
            None if self.text is None else self.text(pooled),
        )

    def _run(
        self, blocks: nn.Module, features: torch.Tensor, guide: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        gate = features
        for block in blocks.children():
            if self.recompute and self.training:
                features, gate = checkpoint(block, features, *guide, use_reentrant=False)
            else:
                features, gate = block(features, *guide)
        return features, gate

    @classmethod
    def sizes_of(cls, weights: Mapping[str, torch.Tensor]) -> tuple[int, ...]:
        width = weights["stem.weight"].shape[0]
        return (
            width,
            weights["encoder.0.0.gate.0.weight"].shape[1] - 3 * width,
            weights["norm.scale_shift.weight"].shape[1],
            weights["classifier.2.weight"].shape[0],
        )


class Curves(Network):
    """Maps the colours of a whole picture by one curve, as a filter does.

    Each channel of the result is a sum of the picture's channels, their squares and a constant. A
    small convolutional network looks at the picture, shrunk to SEEN_PX, and the label, and chooses
    the 3 x 7 factors. So it has few ways to learn a few pairs by heart.
    """

    def __init__(
        self, width: int, num_masks: int, cond_dim: int, num_kinds: int, text_dim: int = 0
    ) -> None:
        super().__init__()
        self.label_shape = (num_masks, cond_dim, num_kinds, text_dim)
        channels = (3, width, 2 * width, 4 * width)
        self.look = nn.Sequential()
        for before, after in pairwise(channels):
            self.look.extend([nn.Conv2d(before, after, 3, 2, 1), nn.GELU()])
        self.condition = nn.Linear(cond_dim, CURVES_WIDTH)
        self.places = nn.Linear(num_masks, CURVES_WIDTH)
        self.seen = nn.Linear(8 * width, CURVES_WIDTH)
        self.head = nn.Linear(CURVES_WIDTH, 3 * 7)
        self.classifier = nn.Linear(8 * width, num_kinds)
        self.text = nn.Linear(8 * width, text_dim) if text_dim else None
        nn.init.zeros_(self.head.weight)  # the untrained student returns its input
        nn.init.zeros_(self.head.bias)

    def forward(self, inputs: dict[str, torch.Tensor]) -> Outputs:
        """Restore `picture` (B, 3, H, W) of any size, as `Student` does."""
        picture, masks = inputs["picture"], inputs["masks"]
        small = functional.interpolate(
            picture, size=(SEEN_PX, SEEN_PX), mode="bilinear", antialias=True
        )
        variance, mean = torch.var_mean(self.look(small), (2, 3), correction=0)
        seen = torch.cat([mean, (variance + EPSILON).sqrt()], 1)
        hidden = self.seen(seen) + self.condition(inputs["z_d"]) + self.places(masks.mean((2, 3)))
        factors = self.head(functional.gelu(hidden)).view(-1, 3, 7)
        terms = torch.cat([torch.ones_like(picture[:, :1]), picture, picture**2], 1)
        restored = picture + torch.einsum("bct,bthw->bchw", factors, terms)
        return Outputs(
            restored if self.training else restored.clamp(0, 1),
            None,
            self.classifier(seen),
            None if self.text is None else self.text(seen),
        )

    @classmethod
    def sizes_of(cls, weights: Mapping[str, torch.Tensor]) -> tuple[int, ...]:
        return (
            weights["look.0.weight"].shape[0],
            weights["places.weight"].shape[1],
            weights["condition.weight"].shape[1],
            weights["classifier.weight"].shape[0],
        )


def read_student(path: Path, flag: str = "--model ") -> Network:
    """Return the network of a weights file, in evaluation mode. Raises UserError."""
    missing = "no such file; training writes it to --save-path"
    weights = read_tensors(path, "a file of weights", missing, flag=flag)
    kind = Curves if "look.0.weight" in weights else Student
    return kind.from_weights(weights, f"{flag}{path}")


class ModulatedNorm(nn.Module):
    """Normalises each channel over the pixels, then scales and shifts it as the condition says."""

    def __init__(self, channels: int, cond_dim: int) -> None:
        super().__init__()
        self.scale_shift = nn.Linear(cond_dim, 2 * channels)

    def forward(self, features: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        """Map (B, C, h, w) with a condition (B, cond_dim)."""
        scale, shift = self.scale_shift(condition)[..., None, None].chunk(2, 1)
        variance, mean = torch.var_mean(features, (2, 3), keepdim=True, correction=0)
        weight = (1 + scale) * torch.rsqrt(variance + EPSILON)
        return torch.addcmul(shift - mean * weight, features, weight)


class MultiScale(nn.Module):
    """The sum of depthwise 3 x 3, 5 x 5 and 7 x 7 convolutions, computed as one: sums of kernels
    give sums of results.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.kernels = nn.ModuleList(
            [nn.Conv2d(channels, channels, k, groups=channels) for k in (3, 5, 7)]
        )

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Map (B, C, h, w) to the same shape."""
        weight, bias = torch.zeros(()), torch.zeros(())
        for kernel in self.kernels:
            assert isinstance(kernel, nn.Conv2d)
            assert kernel.bias is not None
            margin = (7 - kernel.kernel_size[0]) // 2
            padded = functional.pad(kernel.weight, (margin,) * 4)
            weight, bias = (
                (weight + padded, bias + kernel.bias) if weight.dim() else (padded, kernel.bias)
            )
        return functional.conv2d(features, weight, bias, padding=3, groups=features.shape[1])


def channel_attention(
    query: torch.Tensor, key: torch.Tensor, temperature: torch.Tensor, *values: torch.Tensor
) -> list[torch.Tensor]:
    """Return attention between channels for each of `values`; all are (B, C, h, w). `temperature`
    is (heads, 1, 1).

    A channel is a token, and its pixels are the token's vector. Query and key get the length 1, so
    that the scores, which are multiplied by the temperature, do not grow with the number of pixels.
    """
    batch, channels, height, width = query.shape
    heads = len(temperature)
    shape = (batch, heads, channels // heads, height * width)
    query, key = (functional.normalize(tensor.reshape(shape), dim=3) for tensor in (query, key))
    value = torch.cat([tensor.reshape(shape) for tensor in values], 3)
    mixed = functional.scaled_dot_product_attention(query * temperature, key, value, scale=1.0)
    return [part.reshape(batch, channels, height, width) for part in mixed.chunk(len(values), 3)]


class HighFrequencies(nn.Module):
    """A transformer block on the three high bands (B, 3C, h, w): attention, a
    squeeze-and-excitation gate, and an MLP.
    """

    def __init__(self, channels: int, cond_dim: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = (
            ModulatedNorm(channels, cond_dim),
            ModulatedNorm(channels, cond_dim),
        )
        self.qkv = nn.Sequential(MultiScale(channels), nn.Conv2d(channels, 3 * channels, 1))
        self.temperature = nn.Parameter(torch.ones(HEADS, 1, 1))
        self.project = nn.Conv2d(channels, channels, 1)
        reduced = max(channels // SQUEEZE, 1)
        self.squeeze = nn.Sequential(
            nn.Linear(channels, reduced), nn.ReLU(), nn.Linear(reduced, channels), nn.Sigmoid()
        )
        self.mlp = nn.Sequential(
            nn.Conv2d(channels, 2 * channels, 1), nn.GELU(), nn.Conv2d(2 * channels, channels, 1)
        )

    def forward(self, bands: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        """Map (B, 3C, h, w) to the same shape."""
        normed = self.norm1(bands, condition)
        query, key, value = self.qkv(normed).chunk(3, 1)
        (mixed,) = channel_attention(query, key, self.temperature, value)
        weights = self.squeeze(normed.mean((2, 3)))[..., None, None]
        bands = bands + self.project(mixed) + normed * weights
        return bands + self.mlp(self.norm2(bands, condition))


class LowFrequencies(nn.Module):
    """A block on the low band (B, C, h, w): a depthwise convolution, and 1 x 1 convolutions on
    amplitude and phase.
    """

    def __init__(self, channels: int, cond_dim: int) -> None:
        super().__init__()
        self.norm = ModulatedNorm(channels, cond_dim)
        self.local = nn.Sequential(MultiScale(channels), nn.Conv2d(channels, channels, 1))
        self.amplitude, self.phase = (
            nn.Conv2d(channels, channels, 1),
            nn.Conv2d(channels, channels, 1),
        )
        self.project = nn.Conv2d(channels, channels, 1)

    def forward(self, low: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        """Map (B, C, h, w) to the same shape."""
        mixed = self.local(self.norm(low, condition))
        spectrum = torch.fft.rfft2(mixed.float(), norm="ortho")
        # The derivative of amplitude and phase is infinite at 0.
        real, imaginary = spectrum.real + EPSILON, spectrum.imag
        amplitude, phase = (
            torch.sqrt(real**2 + imaginary**2 + EPSILON**2),
            torch.atan2(imaginary, real),
        )
        amplitude, phase = amplitude + self.amplitude(amplitude), phase + self.phase(phase)
        spectrum = torch.complex(amplitude * phase.cos(), amplitude * phase.sin())
        spectral = torch.fft.irfft2(spectrum, s=mixed.shape[2:], norm="ortho").to(mixed.dtype)
        return low + self.project(mixed + spectral)


class Block(nn.Module):
    """One wavelet block: high and low bands apart, attention across them, and a gate that merges
    both guided by the label.
    """

    def __init__(self, channels: int, cond_dim: int, num_masks: int) -> None:
        super().__init__()
        self.high, self.low = (
            HighFrequencies(3 * channels, cond_dim),
            LowFrequencies(channels, cond_dim),
        )
        self.query, self.key = nn.Conv2d(channels, channels, 1), nn.Conv2d(channels, channels, 1)
        self.value_high, self.value_low = (
            nn.Conv2d(channels, channels, 1),
            nn.Conv2d(channels, channels, 1),
        )
        self.temperature = nn.Parameter(torch.ones(CROSS_HEADS, 1, 1))
        self.condition = nn.Linear(cond_dim, channels)
        self.gate = nn.Sequential(
            nn.Conv2d(3 * channels + num_masks, channels, 1), nn.ReLU(), nn.Conv2d(channels, 1, 1)
        )

    def forward(
        self, features: torch.Tensor, z_d: torch.Tensor, masks: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Map (B, C, h, w) to the same shape; also return the gate (B, 1, h/2, w/2)."""
        low, *high_bands = haar(features)
        high = self.high(torch.cat(high_bands, 1), z_d)
        low = self.low(low, z_d)
        high_bands = list(high.chunk(3, 1))
        high_sum = high_bands[0] + high_bands[1] + high_bands[2]
        from_high, from_low = channel_attention(
            self.query(high_sum),
            self.key(low),
            self.temperature,
            self.value_high(high_sum),
            self.value_low(low),
        )
        size = low.shape[2:]
        condition = self.condition(z_d)[..., None, None].expand(-1, -1, *size)
        guide = functional.interpolate(masks, size=size, mode="bilinear", antialias=False)
        gate = torch.sigmoid(self.gate(torch.cat([from_high, from_low, condition, guide], 1)))
        merged = low + gate * from_high + (1 - gate) * from_low
        return features + inverse_haar(merged, *high_bands), gate


def haar(features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the orthonormal Haar bands LL, LH, HL, HH of (B, C, h, w), even sides: each (B, C,
    h/2, w/2).
    """
    top, bottom = features[:, :, ::2] / 2, features[:, :, 1::2] / 2
    total, difference = top + bottom, top - bottom
    left, right = slice(None, None, 2), slice(1, None, 2)
    return (
        total[..., left] + total[..., right],
        total[..., left] - total[..., right],
        difference[..., left] + difference[..., right],
        difference[..., left] - difference[..., right],
    )


def inverse_haar(
    low: torch.Tensor, lh: torch.Tensor, hl: torch.Tensor, hh: torch.Tensor
) -> torch.Tensor:
    """Return the features (B, C, h, w) of four bands (B, C, h/2, w/2)."""
    batch, channels, height, width = low.shape
    top = torch.stack([low + lh + hl + hh, low - lh + hl - hh], 4)
    bottom = torch.stack([low + lh - hl - hh, low - lh - hl + hh], 4)
    rows = torch.stack([top.flatten(3), bottom.flatten(3)], 3)  # (B, C, h/2, 2, w)
    return rows.reshape(batch, channels, 2 * height, 2 * width) / 2
