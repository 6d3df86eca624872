"""Count the memory of a training step on a GPU, without computing the step and without a GPU.

    python measure_memory.py

Weights, gradients and Adam's averages, and all tensors that autograd keeps for the backward pass, VGG's included. Workspaces,
temporary tensors and the CUDA context (about 0.5 GB) come on top.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import torch

from underwater_ir.data.pseudo_labels import PROMPTS
from underwater_ir.student.losses import RELU_3_4, WEIGHTS, StudentLoss, keep_inputs_of_relu
from underwater_ir.student.network import Block, Student
from utils.common.config import Options, option, parse_config
from utils.common.text import format_table

STATE_PER_WEIGHT = 4  # weight, gradient and Adam's two averages


@dataclass(frozen=True)
class MemoryConfig(Options):
    width: int = option(64, "channels of the first level", at_least=4)
    batch_sizes: tuple[int, ...] = option((4, 8, 16), "pictures per GPU", at_least=1)
    sizes: tuple[int, ...] = option((256, 512), "sides of the pictures in pixels", at_least=16)


def main() -> None:
    config = parse_config(MemoryConfig, "Count what a training step keeps on the GPU.")
    rows = []
    for batch, size in product(config.batch_sizes, config.sizes):
        kept = (step_bytes(config.width, batch, size, recompute) for recompute in (False, True))
        rows.append([batch, size, *(f"{num_bytes / 1e9:.1f} GB" for num_bytes in kept)])
    print(format_table(["batch", "pixels", "--no-recompute", "--recompute"], rows))


def step_bytes(width: int, batch_size: int, size_px: int, recompute: bool) -> int:
    """Return the bytes of the training state and of what autograd keeps until the backward pass, at its largest."""
    from torchvision.models import vgg19

    kinds = len(PROMPTS)
    with torch.device("meta"):
        network = Student(width, kinds, 2 * kinds, kinds, recompute=recompute)
        features = vgg19(weights=None).features[: RELU_3_4 + 1].requires_grad_(False)
        keep_inputs_of_relu(features)
        picture = torch.empty(batch_size, 3, size_px, size_px)
        samples = {
            "picture": picture,
            "target": torch.empty_like(picture),
            "masks": torch.empty(batch_size, kinds, size_px, size_px),
            "z_d": torch.empty(batch_size, 2 * kinds),
            "global_prob": torch.empty(batch_size, kinds),
            "confidence_scale": torch.empty(batch_size),
        }
        kept = kept_bytes(network, lambda: StudentLoss(WEIGHTS, features)(network(samples), samples))
        if recompute:  # the backward pass holds the inside of one block at a time
            block, inside = Block(width, 2 * kinds, kinds), torch.empty(batch_size, width, size_px, size_px)
            kept += kept_bytes(block, lambda: block(inside, samples["z_d"], samples["masks"]))
    return kept + STATE_PER_WEIGHT * sum(weight.nbytes for weight in network.parameters())


def kept_bytes(module: torch.nn.Module, compute: Callable[[], object]) -> int:
    """Return the bytes of the tensors that autograd keeps while `compute` runs, without the module's weights."""
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        compute()
    weights = {weight.untyped_storage()._cdata for weight in module.parameters()}
    return sum(storage.nbytes() for key, storage in kept.items() if key not in weights)
