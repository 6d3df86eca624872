"""The optimizer for YOLO: its settings, its parameter groups, the learning rate for another batch
size.
"""

import contextlib
import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from yolo_seg_ddp.yolo.options import NOMINAL_BATCH_SIZE, SGD_LR
from yolo_seg_ddp.yolo.orthogonal import Orthogonaliser

# factor of Muon's update, which MuSGD adds to SGD's; 0.2 in Ultralytics (docs/research/recipe.md)
MUON_GAIN = 1.6
OPTIMIZER_NAMES = {"sgd": "SGD", "musgd": "MuSGD", "adamw": "AdamW"}
GRADIENT_CLIP_NORM = 10.0  # YOLOv8's limit for the gradient of the nominal batch


@dataclass(frozen=True)
class OptimizerPlan:
    """The optimizer and its settings as used, scaled to the batch.

    `arithmetic`: lines that explain them.
    """

    name: str
    lr: float
    weight_decay: float
    momentum: float
    global_batch_size: int
    arithmetic: tuple[str, ...]
    base_lr: float = SGD_LR  # before it was scaled


class MuSGD(torch.optim.SGD):
    """SGD that also moves the matrices of groups with `use_muon` along their orthogonalised
    momentum.

    A convolution's weight is the matrix (output channels, the rest). The second update is Muon's
    (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon) times `MUON_GAIN`, from SGD's
    own Nesterov momentum, as the length of a momentum does not matter there. The sum of both is the
    idea of Ultralytics' class of this name. That one computes in bf16, which takes seconds a step
    on a CPU that has no instructions for it, and keeps two momenta.
    """

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        self._orthogonalisers: dict[int, Orthogonaliser] = {}
        for group in self.param_groups:
            group.setdefault("use_muon", False)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._orthogonalisers = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Take both steps, or neither when the gradient is not finite: then `found_inf`, a tensor
        (), is 1.
        """
        loss = super().step(closure)
        found_inf = getattr(self, "found_inf", None)
        for number, group in enumerate(self.param_groups):
            weights = (
                [weight for weight in group["params"] if weight.grad is not None]
                if group["use_muon"]
                else []
            )
            if not weights:
                continue
            gradients = [weight.grad for weight in weights]
            momenta = [self.state[weight]["momentum_buffer"] for weight in weights]
            with full_matmul_precision():
                updates = self._orthogonaliser(number, weights).sum_of(
                    gradients, momenta, group["momentum"]
                )
            # SGD's kernel: it takes no step where `found_inf` is 1.
            torch._fused_sgd_(
                weights,
                updates,
                [],
                lr=group["lr"] * MUON_GAIN,
                weight_decay=0.0,
                momentum=0.0,
                dampening=0.0,
                nesterov=False,
                maximize=False,
                is_first_step=False,
                found_inf=found_inf,
            )
        return loss

    def _orthogonaliser(self, number: int, weights: list[torch.Tensor]) -> Orthogonaliser:
        known = self._orthogonalisers.get(number)
        if (
            known is None
            or len(weights) != len(known.weights)
            or any(map(operator.is_not, weights, known.weights))
        ):
            known = self._orthogonalisers[number] = Orthogonaliser(weights)
        return known


@contextlib.contextmanager
def full_matmul_precision() -> Iterator[None]:
    """Multiply float32 matrices in float32 on a GPU, too: TF32's 10 bits are too few for the powers
    of X X'.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def build_optimizer(model: torch.nn.Module, plan: OptimizerPlan) -> torch.optim.Optimizer:
    """Build SGD with Nesterov momentum, MuSGD or AdamW over
    `parameter_groups`, with fused updates.
    """
    groups = parameter_groups(model, plan.weight_decay)
    if plan.name == "musgd":
        groups = [{**group, "use_muon": group["name"] == "weight"} for group in groups]
        return MuSGD(groups, lr=plan.lr, momentum=plan.momentum, nesterov=True, fused=True)
    if plan.name == "sgd":
        return torch.optim.SGD(
            groups, lr=plan.lr, momentum=plan.momentum, nesterov=True, fused=True
        )
    return torch.optim.AdamW(groups, lr=plan.lr, betas=(plan.momentum, 0.999), fused=True)


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Split trainable parameters into weights (decayed), normalisation and biases (not decayed)."""
    groups: dict[str, list[nn.Parameter]] = {"weight": [], "norm": [], "bias": []}
    for module in model.modules():
        is_norm = isinstance(module, nn.modules.batchnorm._BatchNorm | nn.GroupNorm | nn.LayerNorm)
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad:
                groups["bias" if name == "bias" else "norm" if is_norm else "weight"].append(
                    parameter
                )
    return [
        {
            "params": parameters,
            "weight_decay": weight_decay if name == "weight" else 0.0,
            "name": name,
        }
        for name, parameters in groups.items()
    ]


def scaled_lr(lr: float, rule: str, global_batch_size: int) -> float:
    """Scale a learning rate given for the nominal batch of 64 to another batch by `none`, `linear`
    or `sqrt`.

    Linear: Goyal et al. 2017, section 2.1; square root: usual for Adam (Malladi et al. 2022).
    """
    ratio = global_batch_size / NOMINAL_BATCH_SIZE
    return lr * {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[rule]
