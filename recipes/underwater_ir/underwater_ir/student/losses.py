"""The student's losses.

Each is a mean over the pictures, so that N ranks compute what one rank would.
"""

import contextlib
import io
import json
import math
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from underwater_ir.metrics import ssim
from underwater_ir.student.network import Outputs, haar
from yolo_seg_ddp.utils.distributed import all_reduce_sum, communication_device, world_size
from yolo_seg_ddp.utils.errors import UserError, one_line
from yolo_seg_ddp.utils.files import local_rank_first, read_text
from yolo_seg_ddp.utils.option_names import nearest

WEIGHTS = {
    "rec": 1.0,  # Charbonnier distance
    "ssim": 0.2,
    "perc": 0.05,  # VGG19 features
    "hf": 0.5,  # high wavelet bands, where the first mask is
    "lf": 0.5,  # spectrum of the low band, where the last mask is
    "region": 0.3,  # each mask's region
    "tv": 1e-4,  # total variation
    "kd": 0.1,  # the teacher's kinds of degradation
    "feat": 0.05,  # the gate follows the masks
    "ctr": 0.05,  # InfoNCE with the text embeddings of the label, where it has some
}
CHARBONNIER_EPSILON = 1e-3
TEMPERATURE = 0.07
SMALLEST_MASK = 1e-6
RELU_2_2, RELU_3_4 = 8, 17  # indices in torchvision's vgg19().features
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
DOWNLOAD_TIMEOUT_S = 20.0

Targets = dict[str, torch.Tensor]


def read_weights(file: str | None) -> dict[str, float]:
    """Return the losses' weights, changed by a JSON file such as {"perc": 0}. Raises UserError."""
    if file is None:
        return dict(WEIGHTS)
    try:
        given = json.loads(read_text(Path(file)))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"--loss-config {file}: no JSON file ({one_line(error)})") from error
    if not isinstance(given, dict):
        raise UserError(f'--loss-config {file}: expected an object such as {{"perc": 0}}')
    for name, value in given.items():
        if name not in WEIGHTS:
            raise UserError(
                f"--loss-config {file}: unknown loss {name}{nearest(name, list(WEIGHTS))}; known "
                f"are {', '.join(WEIGHTS)}"
            )
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not 0 <= value < math.inf
        ):
            raise UserError(
                f"--loss-config {file}: {name}: {value!r} is not a number of at least 0"
            )
    return WEIGHTS | {name: float(value) for name, value in given.items()}


class StudentLoss:
    """The weighted sum of the losses. `features` are VGG19's, for `perc`.

    Each rank calls it with its own pictures. It returns the loss to differentiate, and the means
    over the rank's pictures to report. DDP's mean of this loss over the ranks is the mean over all
    pictures.
    """

    def __init__(self, weights: Mapping[str, float], features: nn.Module | None = None) -> None:
        used = {name: weight for name, weight in weights.items() if weight > 0}
        self.weights = (
            used if features is not None else {k: w for k, w in used.items() if k != "perc"}
        )
        self.features = features

    def __call__(
        self, outputs: Outputs, targets: Targets
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        terms = {
            name: TERMS[name](outputs, targets)
            for name in self.weights
            if name in TERMS and (name != "feat" or outputs.gate is not None)
        }
        if "perc" in self.weights and self.features is not None:
            terms["perc"] = perceptual(self.features, outputs.picture, targets["target"])
        if "ctr" in self.weights and outputs.text is not None and "text_embeddings" in targets:
            terms["ctr"] = contrast(outputs.text, targets)
        # Every output takes part, also without its loss: DDP waits for the gradient of every
        # parameter.
        unused = (outputs.degradation, outputs.gate, outputs.text)
        nothing = 0 * sum(
            (tensor.mean() for tensor in unused if tensor is not None), outputs.picture.mean()
        )
        # (B,)
        each = torch.stack([self.weights[name] * term for name, term in terms.items()]).sum(0)
        reported = {name: term.detach().mean() for name, term in terms.items()}
        return each.sum() * self._share(len(each)) + nothing, {
            **reported,
            "loss": each.detach().mean(),
        }

    @staticmethod
    def _share(num_pictures: int) -> float:
        """Return the factor of the sum over this rank's pictures. Every rank must reach this."""
        count = torch.tensor([num_pictures], dtype=torch.float32, device=communication_device())
        return world_size() / float(all_reduce_sum(count).item())


def reconstruction(outputs: Outputs, targets: Targets) -> torch.Tensor:
    difference = outputs.picture - targets["target"]
    return torch.sqrt(difference**2 + CHARBONNIER_EPSILON**2).mean((1, 2, 3))


def dissimilarity(outputs: Outputs, targets: Targets) -> torch.Tensor:
    return 1 - ssim(outputs.picture, targets["target"])


def high_frequency(outputs: Outputs, targets: Targets) -> torch.Tensor:
    # (B, 3, 3, h, w)
    difference = torch.stack(haar(outputs.picture - targets["target"])[1:], 1).abs()
    return masked_mean(difference.mean(2), targets["masks"][:, :1]).sum(1)


def low_frequency(outputs: Outputs, targets: Targets) -> torch.Tensor:
    """Return the distance of the amplitudes.

    The mask is one of places, so it weights the bands, not their spectra.
    """
    low, wanted = haar(outputs.picture)[0], haar(targets["target"])[0]
    mask = functional.interpolate(targets["masks"][:, -1:], size=low.shape[2:], mode="nearest")
    mine, theirs = (torch.fft.fft2(band * mask, norm="ortho").abs() for band in (low, wanted))
    return ((mine - theirs).abs().sum((2, 3)) / mask.sum((2, 3)).clamp_min(SMALLEST_MASK)).mean(1)


def regions(outputs: Outputs, targets: Targets) -> torch.Tensor:
    difference = (outputs.picture - targets["target"]).abs().mean(1, keepdim=True)
    return masked_mean(difference, targets["masks"]).mean(1)


def variation(outputs: Outputs, targets: Targets) -> torch.Tensor:
    picture = outputs.picture
    return picture.diff(dim=2).abs().mean((1, 2, 3)) + picture.diff(dim=3).abs().mean((1, 2, 3))


def distillation(outputs: Outputs, targets: Targets) -> torch.Tensor:
    teacher = targets["global_prob"]
    teacher = teacher / teacher.sum(1, keepdim=True).clamp_min(SMALLEST_MASK)
    student = outputs.degradation.log_softmax(1)
    divergence = functional.kl_div(student, teacher, reduction="none").sum(1)
    return targets["confidence_scale"] * divergence


def gate_follows(outputs: Outputs, targets: Targets) -> torch.Tensor:
    assert outputs.gate is not None
    wanted = targets["masks"].mean(1, keepdim=True)
    wanted = functional.interpolate(
        wanted, size=outputs.gate.shape[2:], mode="bilinear", antialias=False
    )
    return (outputs.gate - wanted).abs().mean((1, 2, 3))


TERMS: dict[str, Callable[[Outputs, Targets], torch.Tensor]] = {
    "rec": reconstruction,
    "ssim": dissimilarity,
    "hf": high_frequency,
    "lf": low_frequency,
    "region": regions,
    "tv": variation,
    "kd": distillation,
    "feat": gate_follows,
}  # each returns one value for each picture: (B,)


def masked_mean(values: torch.Tensor, masks: torch.Tensor) -> torch.Tensor:
    """Return the mean over the pixels of (B, C, h, w), weighted by masks (B, 1 or C, H, W): (B, C).

    A mask of another size is resized (nearest). A picture's own mask normalises it, so that a
    batch's other pictures, on this rank or another, change nothing.
    """
    if masks.shape[2:] != values.shape[2:]:
        masks = functional.interpolate(masks, size=values.shape[2:], mode="nearest")
    return (values * masks).sum((2, 3)) / masks.sum((2, 3)).clamp_min(SMALLEST_MASK)


def contrast(text: torch.Tensor, targets: Targets) -> torch.Tensor:
    """Return InfoNCE (B,): a picture's projection (B, D) against the K text embeddings of its
    label; the most likely is true.
    """
    embeddings = functional.normalize(targets["text_embeddings"], dim=2)  # (B, K, D)
    similarity = torch.einsum("bd,bkd->bk", functional.normalize(text, dim=1), embeddings)
    return functional.cross_entropy(
        similarity / TEMPERATURE, targets["global_prob"].argmax(1), reduction="none"
    )


def perceptual(features: nn.Module, picture: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the distance (B,) of VGG19's features relu2_2 and relu3_4."""
    mean, std = (
        picture.new_tensor(values).view(1, 3, 1, 1) for values in (IMAGENET_MEAN, IMAGENET_STD)
    )
    mine, theirs = (picture - mean) / std, (target - mean) / std
    total = picture.new_zeros(len(picture))
    for number, layer in enumerate(features.children()):
        mine = layer(mine)
        with torch.no_grad():
            theirs = layer(theirs)
        if number in (RELU_2_2, RELU_3_4):
            total = total + (mine - theirs).abs().mean((1, 2, 3))
    return total


def load_vgg(file: str | None, cache: Path, say: Callable[[str], None] = print) -> nn.Sequential:
    """Return VGG19's frozen features up to relu3_4, from a file of torchvision's weights or
    downloaded into `cache` (548 MB).

    Every rank may call this at the same time; `say` announces a download and is silent on all ranks
    but one.

    Raises UserError when they can be neither read nor fetched.
    """
    from torchvision.models import VGG19_Weights, vgg19

    try:
        if file is None:
            url = VGG19_Weights.IMAGENET1K_V1.url
            target = cache / url.rpartition("/")[2]
            if not target.is_file():
                say(f'Downloading: "{url}" to {target}')
            with local_rank_first(cache / "vgg19.lock"):
                weights = _download(url, cache)
        else:
            weights = torch.load(file, map_location="cpu", weights_only=True)
        features = vgg19(weights=None).features[: RELU_3_4 + 1]
        prefix = "features."
        own = {
            name.removeprefix(prefix): value
            for name, value in weights.items()
            if name.startswith(prefix)
        }
        features.load_state_dict({name: own[name] for name in features.state_dict()})
    except Exception as error:  # a foreign file can raise anything, and so can a network
        raise UserError(f"VGG19's weights: {one_line(error)}") from error
    keep_inputs_of_relu(features)
    features.eval().requires_grad_(False)
    return features


def keep_inputs_of_relu(features: nn.Sequential) -> None:
    """Make ReLU layers leave their inputs as they are: the loss compares features before a later
    layer changes them.
    """
    for layer in features.children():
        if isinstance(layer, nn.ReLU):
            layer.inplace = False


def _download(url: str, cache: Path) -> dict[str, Any]:
    before_s = socket.getdefaulttimeout()
    socket.setdefaulttimeout(DOWNLOAD_TIMEOUT_S)
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # every rank would print its progress
            weights: dict[str, Any] = torch.hub.load_state_dict_from_url(
                url,
                str(cache),
                map_location="cpu",
                progress=False,
                check_hash=True,
                weights_only=True,
            )
    finally:
        socket.setdefaulttimeout(before_s)
    return weights
