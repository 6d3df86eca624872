"""The optimizer for YOLO: its settings, its parameter groups, the learning rate for another batch size."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from utils.common.environment import prepare_environment

NOMINAL_BATCH_SIZE = 64  # the batch YOLOv8's learning rate, weight decay and gradient clip were tuned for
SGD_LR = 0.01  # of SGD and MuSGD, for the nominal batch
MUON_GAIN, SGD_GAIN = 0.2, 1.0  # of the two updates that MuSGD adds up; Ultralytics' values
SGD_WARMUP_BIAS_LR = 0.1  # YOLOv8's warmup_bias_lr; with `optimizer=auto` Ultralytics sets it to 0
OPTIMIZER_NAMES = {"sgd": "SGD", "musgd": "MuSGD", "adamw": "AdamW"}
GRADIENT_CLIP_NORM = 10.0  # YOLOv8's limit for the gradient of the nominal batch


@dataclass(frozen=True)
class OptimizerPlan:
    """The optimizer and its settings as used, scaled to the batch. `arithmetic`: lines that explain them."""

    name: str
    lr: float
    weight_decay: float
    momentum: float
    warmup_bias_lr: float
    global_batch_size: int
    arithmetic: tuple[str, ...]


def build_optimizer(model: torch.nn.Module, plan: OptimizerPlan) -> torch.optim.Optimizer:
    """Build SGD with Nesterov momentum, MuSGD or AdamW over `parameter_groups`, with fused updates where PyTorch has them.

    MuSGD moves each convolution by SGD's update and by Muon's: its momentum with all singular values brought near one
    (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon).
    """
    groups = parameter_groups(model, plan.weight_decay)
    if plan.name == "musgd":
        prepare_environment()
        from ultralytics.optim import MuSGD

        groups = [{**group, "use_muon": group["name"] == "weight"} for group in groups]
        muon_sgd: torch.optim.Optimizer = MuSGD(
            groups, lr=plan.lr, momentum=plan.momentum, nesterov=True, muon=MUON_GAIN, sgd=SGD_GAIN
        )
        return muon_sgd
    if plan.name == "sgd":
        return torch.optim.SGD(groups, lr=plan.lr, momentum=plan.momentum, nesterov=True, fused=True)
    return torch.optim.AdamW(groups, lr=plan.lr, betas=(plan.momentum, 0.999), fused=True)


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Split trainable parameters into weights (decayed), normalisation and biases (not decayed)."""
    groups: dict[str, list[nn.Parameter]] = {"weight": [], "norm": [], "bias": []}
    for module in model.modules():
        is_norm = isinstance(module, nn.modules.batchnorm._BatchNorm | nn.GroupNorm | nn.LayerNorm)
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad:
                groups["bias" if name == "bias" else "norm" if is_norm else "weight"].append(parameter)
    return [
        {"params": parameters, "weight_decay": weight_decay if name == "weight" else 0.0, "name": name}
        for name, parameters in groups.items()
    ]


def scaled_lr(lr: float, rule: str, global_batch_size: int) -> float:
    """Scale a learning rate given for the nominal batch of 64 to another batch by `none`, `linear` or `sqrt`.

    Linear: Goyal et al. 2017, section 2.1; square root: usual for Adam (Malladi et al. 2022).
    """
    ratio = global_batch_size / NOMINAL_BATCH_SIZE
    return lr * {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[rule]
