"""The optimizer over YOLO's three parameter groups."""

from __future__ import annotations

import torch

from utils.model import parameter_groups
from utils.train_config import OptimizerPlan

GRADIENT_CLIP_NORM = 10.0  # YOLOv8's; it bounds the gradient of the nominal batch of 64


def build_optimizer(model: torch.nn.Module, plan: OptimizerPlan) -> torch.optim.Optimizer:
    """Build SGD with Nesterov momentum or AdamW over the weights, the normalisations and the biases; fused updates."""
    groups = parameter_groups(model, plan.weight_decay)
    if plan.name == "sgd":
        return torch.optim.SGD(groups, lr=plan.lr, momentum=plan.momentum, nesterov=True, fused=True)
    return torch.optim.AdamW(groups, lr=plan.lr, betas=(plan.momentum, 0.999), fused=True)
