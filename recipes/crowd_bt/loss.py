"""The Crowd-BT loss, equal for any number of processes.

Chen et al. 2013, "Pairwise ranking aggregation in a crowdsourced setting": an annotator of
reliability η answers by the qualities with probability η and against them otherwise. η is 1 for a
perfect annotator, 0.5 for one who guesses and 0 for one who always says the opposite. The share of
right answers on gold pairs measures it. Davidson 1970, "On extending the Bradley-Terry model to
accommodate ties": a draw has the probability ν / (2 cosh(d/2) + ν), whoever answers.
"""

import math
from dataclasses import dataclass

import torch
from torch.nn.functional import logsigmoid

from yolo_seg_ddp.utils.distributed import all_reduce_sum, world_size

EPSILON = 1e-8
DRAW_BELOW = 0.1  # a smaller |d| counts as the prediction "draw" while training
PRIOR = (10.0, 1.0)  # Beta(α, β) of an annotator's η: the values of Chen et al.


@dataclass(frozen=True)
class Answers:
    """Annotators' answers about a batch of pairs: `label` +1, -1 or 0, and `weight`, float32 (B,);
    `annotator`, int64 (B,).
    """

    label: torch.Tensor
    weight: torch.Tensor
    annotator: torch.Tensor


def pair_losses(
    difference: torch.Tensor, label: torch.Tensor, eta: torch.Tensor, draw_log: torch.Tensor
) -> torch.Tensor:
    """Return -log of each answer's probability (B,), unweighted.

    With P₀ = ν / (2 cosh(d/2) + ν) it is P₀ for a draw, (1 - P₀) (η σ(d) + (1 - η) σ(-d)) for d
    towards the answer's side. `difference` d (B,), `eta` () or (B,), `draw_log` log ν ().
    """
    towards = difference * label
    answered = torch.logaddexp(
        _log(eta) + logsigmoid(towards), _log(1 - eta) + logsigmoid(-towards)
    )
    decided = torch.logaddexp(difference / 2, -difference / 2)  # log of 2 cosh(d/2)
    return torch.logaddexp(decided, draw_log) - torch.where(
        label == 0, draw_log, decided + answered
    )


def draw_log_of(num_draws: float, num_answers: float) -> float:
    """Return the log ν that gives this share of draws (half a draw more than there are) to pairs of
    equal quality.
    """
    share = (num_draws + 0.5) / (num_answers + 1)
    return math.log(2 * share / (1 - share))


def _log(probability: torch.Tensor) -> torch.Tensor:
    """Return the logarithm, at 0 with a gradient of 0 instead of nan."""
    is_above = probability > 0
    return torch.where(is_above, torch.log(torch.where(is_above, probability, 1.0)), -torch.inf)


def prior_loss(eta: torch.Tensor) -> torch.Tensor:
    """Return -log of the prior density of annotators' η (K,), without its constant: () ."""
    alpha, beta = PRIOR
    return -(
        (alpha - 1) * torch.log(eta + EPSILON) + (beta - 1) * torch.log(1 - eta + EPSILON)
    ).sum()


def crowd_loss(
    difference: torch.Tensor, eta: torch.Tensor, draw_log: torch.Tensor, answers: Answers
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return this rank's loss and accuracy. Their means over the ranks equal those of the pairs of
    all ranks.

    Both are weighted sums, divided by the weights of all ranks. `eta`: the crowd's (), or each
    annotator's (K,). Every rank must reach this.
    """
    losses = pair_losses(
        difference, answers.label, eta[answers.annotator] if eta.dim() else eta, draw_log
    )
    total_weight = all_reduce_sum(answers.weight.sum()) + EPSILON
    share = answers.weight * (world_size() / total_weight)
    is_right = predicted(difference.detach(), DRAW_BELOW) == answers.label
    return (losses * share).sum(), {"accuracy": (is_right * share).sum()}


def predicted(difference: torch.Tensor, draw_below: float) -> torch.Tensor:
    """Return +1, -1 or, for |d| up to `draw_below`, 0 (B,)."""
    return torch.sign(difference) * (difference.abs() > draw_below)
