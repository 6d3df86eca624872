"""The Crowd-BT loss, equal for any number of processes.

Chen et al. 2013, "Pairwise ranking aggregation in a crowdsourced setting": an annotator of reliability η answers by the
qualities with probability η and against them otherwise. η is 1 for a perfect annotator, 0.5 for one who guesses and 0 for
one who always says the opposite. The share of right answers on gold pairs measures it.
"""

from dataclasses import dataclass

import torch
from torch.nn.functional import logsigmoid

from utils.distributed import all_reduce_sum, world_size

EPSILON = 1e-8
DRAW_SHARE = 0.5  # weight of a draw's |d| beside a win's log-likelihood
DRAW_BELOW = 0.1  # a smaller |d| counts as the prediction "draw" while training
PRIOR = (10.0, 1.0)  # Beta(α, β) of an annotator's η: the values of Chen et al.


@dataclass(frozen=True)
class Answers:
    """Annotators' answers about a batch of pairs: `label` +1, -1 or 0, and `weight`, float32 (B,); `annotator`, int64 (B,)."""

    label: torch.Tensor
    weight: torch.Tensor
    annotator: torch.Tensor


def pair_losses(difference: torch.Tensor, label: torch.Tensor, eta: torch.Tensor) -> torch.Tensor:
    """Return the loss of each pair (B,), unweighted.

    With p = η σ(±d) + (1 - η) σ(∓d) for the answer's side, it is -log(p + ε); for a draw |d|/2. `difference` d (B,), `eta`
    () or (B,).
    """
    towards = difference * label
    answered = -torch.log(eta * logsigmoid(towards).exp() + (1 - eta) * logsigmoid(-towards).exp() + EPSILON)
    return torch.where(label == 0, DRAW_SHARE * difference.abs(), answered)


def prior_loss(eta: torch.Tensor) -> torch.Tensor:
    """Return -log of the prior density of annotators' η (K,), without its constant: () ."""
    alpha, beta = PRIOR
    return -((alpha - 1) * torch.log(eta + EPSILON) + (beta - 1) * torch.log(1 - eta + EPSILON)).sum()


def crowd_loss(
    difference: torch.Tensor, eta: torch.Tensor, answers: Answers
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return this rank's loss and accuracy. Their means over the ranks equal those of the pairs of all ranks.

    Both are weighted sums, divided by the weights of all ranks. `eta`: the crowd's (), or each annotator's (K,). Every rank
    must reach this.
    """
    losses = pair_losses(difference, answers.label, eta[answers.annotator] if eta.dim() else eta)
    total_weight = all_reduce_sum(answers.weight.sum()) + EPSILON
    share = answers.weight * (world_size() / total_weight)
    is_right = predicted(difference.detach(), DRAW_BELOW) == answers.label
    return (losses * share).sum(), {"accuracy": (is_right * share).sum()}


def predicted(difference: torch.Tensor, draw_below: float) -> torch.Tensor:
    """Return +1, -1 or, for |d| up to `draw_below`, 0 (B,)."""
    return torch.sign(difference) * (difference.abs() > draw_below)
