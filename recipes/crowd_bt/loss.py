"""The Crowd-BT loss, equal for any number of processes.

Chen et al. 2013, "Pairwise ranking aggregation in a crowdsourced setting": an annotator of reliability η follows the
qualities with probability η and guesses otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import logsigmoid

from utils.distributed import all_reduce_sum, world_size

EPSILON = 1e-8
DRAW_SHARE = 0.5  # weight of a draw's |d| beside a win's log-likelihood
DRAW_BELOW = 0.1  # a smaller |d| counts as the prediction "draw" while training
ETA_RANGE = (0.5, 1.0)  # of a fixed reliability


@dataclass(frozen=True)
class Answers:
    """What annotators said about the pairs of a batch: float32 (B,) each; `label` is +1, -1 or 0."""

    label: torch.Tensor
    weight: torch.Tensor
    reliability: torch.Tensor


def pair_losses(difference: torch.Tensor, label: torch.Tensor, eta: torch.Tensor) -> torch.Tensor:
    """Return the loss of each pair (B,), unweighted.

    With p = η σ(±d) + (1 - η)/2 for the answer's side, it is -log(p + ε); for a draw |d|/2. `difference` d (B,), `eta`
    () or (B,).
    """
    agreement = logsigmoid(difference * label).exp()
    answered = -torch.log(eta * agreement + (1 - eta) / 2 + EPSILON)
    return torch.where(label == 0, DRAW_SHARE * difference.abs(), answered)


def fixed_eta(reliability: torch.Tensor) -> torch.Tensor:
    """Return η of annotations with a reliability of their own."""
    return reliability.clamp(*ETA_RANGE)


def crowd_loss(
    difference: torch.Tensor, eta: torch.Tensor | None, answers: Answers
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return this rank's loss, whose mean over the ranks is that of all their pairs, and the accuracy in the same way.

    Both are weighted sums, divided by the weights of all ranks. `eta`: the crowd's, or None for each annotation's own.
    Every rank must reach this.
    """
    eta = fixed_eta(answers.reliability) if eta is None else eta
    losses = pair_losses(difference, answers.label, eta)
    total_weight = all_reduce_sum(answers.weight.sum()) + EPSILON
    share = answers.weight * (world_size() / total_weight)
    is_right = predicted(difference.detach(), DRAW_BELOW) == answers.label
    return (losses * share).sum(), {"accuracy": (is_right * share).sum()}


def predicted(difference: torch.Tensor, draw_below: float) -> torch.Tensor:
    """Return +1, -1 or, for |d| up to `draw_below`, 0 (B,)."""
    return torch.sign(difference) * (difference.abs() > draw_below)
