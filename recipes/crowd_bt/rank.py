"""Rank items by people's votes, without a network: qualities and annotators' reliabilities, each
with its standard error.

    python rank.py --votes votes.csv --output ranking.json

votes.csv has the columns left, right, choice (left, right or draw) and, if it is known, annotator.
The model is that of train.py (loss.py), each item's quality a number of its own.
"""

import csv
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]  # where the package crowd_bt is
import numpy as np
import torch
from crowd_bt.comparisons import Comparison, image_list, label_of, write_json
from crowd_bt.loss import PRIOR, draw_log_of, pair_losses
from torch.nn.functional import logsigmoid

from yolo_seg_ddp.utils.config import parse_config
from yolo_seg_ddp.utils.errors import EXIT_DONE, UserError, printable, run_script
from yolo_seg_ddp.utils.files import read_text
from yolo_seg_ddp.utils.options import Options, option

Values = dict[str, tuple[float, float]]  # (estimate, standard error) by name


@dataclass(frozen=True)
class RankConfig(Options):
    votes: str = option(
        "votes.csv", "CSV file with the columns left, right, choice and annotator", metavar="FILE"
    )
    output: str | None = option(None, "JSON file for the result", metavar="FILE")
    loss: str = option(
        "crowd-bt", "bradley-terry: all are reliable", choices=("crowd-bt", "bradley-terry")
    )
    alpha: float = option(
        0.1, "qualities have the prior of a normal distribution of variance 1/alpha", above=0
    )


def main() -> int:
    """Rank; return the exit code."""
    config = parse_config(RankConfig, "Rank items by votes")
    items, annotators, draw = fit(
        read_votes(Path(config.votes)), config.alpha, trusts_all=config.loss != "crowd-bt"
    )
    ranking = sorted(items, key=lambda name: -items[name][0])
    for number, name in enumerate(ranking, 1):
        print(f"{number:5d}  {items[name][0]:8.3f} ± {items[name][1]:.3f}  {printable(name, 200)}")
    for name, (eta, error) in sorted(annotators.items(), key=lambda item: item[1]):
        print(f"annotator {printable(name, 200) or '(all)'}: eta {eta:.3f} ± {error:.3f}")
    print(f"a pair of equal quality is a draw with probability {draw:.1%}")
    if config.output is not None:
        rows = [
            {"item": name, "score": items[name][0], "error": items[name][1]} for name in ranking
        ]
        people = {name: {"eta": eta, "error": error} for name, (eta, error) in annotators.items()}
        write_json(
            Path(config.output), {"ranking": rows, "annotators": people, "draw_probability": draw}
        )
    return EXIT_DONE


def read_votes(file: Path) -> list[Comparison]:
    """Return the votes of a CSV file. Raises UserError that names file and line."""
    lines = csv.DictReader(read_text(file).splitlines())
    votes = []
    for line in lines:
        left, right = line.get("left"), line.get("right")
        try:
            label = label_of(line.get("choice"))
        except ValueError as error:
            raise UserError(f"{file}:{lines.line_num}: choice {error}") from error
        if not left or not right or left == right:
            raise UserError(
                f"{file}:{lines.line_num}: expected the names of two items in left and right"
            )
        votes.append(
            Comparison(left, right, label, "vote", annotator_id=line.get("annotator") or None)
        )
    if not votes:
        raise UserError(
            f"{file}: no votes; expected the columns left, right, choice and maybe annotator"
        )
    return votes


def fit(
    votes: Sequence[Comparison], alpha: float, *, trusts_all: bool = False
) -> tuple[Values, Values, float]:
    """Return the items' qualities (mean 0), the annotators' η (empty if all are trusted), and how
    often equal items draw.

    They are the most probable ones. The errors are those of the normal distribution around them
    (Laplace), so they hold for many votes. η has the prior Beta(10, 1) of training; its mode is
    taken on the logit, where it is never at the edge.
    """
    from scipy.optimize import minimize

    names = image_list(votes)
    people = [] if trusts_all else sorted({vote.annotator for vote in votes})
    place, person = (
        {name: number for number, name in enumerate(listed)} for listed in (names, people)
    )
    left, right = (
        torch.tensor([place[getattr(vote, side)] for vote in votes]) for side in ("img1", "img2")
    )
    who = torch.tensor([person.get(vote.annotator, 0) for vote in votes])
    label, weight = (
        torch.tensor([getattr(vote, name) for vote in votes]).double()
        for name in ("label", "weight")
    )
    draws = float(weight[label == 0].sum())
    number = len(names)
    first = [0.0] * number + [math.log(4)] * len(people) + [draw_log_of(draws, float(weight.sum()))]

    def loss_of(values: torch.Tensor) -> torch.Tensor:
        """Return -log of the posterior density.

        A thousandth of a draw and of an answer keep ν finite.
        """
        score = values[:number]
        logits = values[number:-1]
        draw_log = values[-1]
        of_draws = draw_log - math.log(2)  # log-odds of a draw of equal items
        prior = alpha / 2 * score.square().sum() - 1e-3 * (
            logsigmoid(of_draws) + logsigmoid(-of_draws)
        )
        prior = prior - PRIOR[0] * logsigmoid(logits).sum() - PRIOR[1] * logsigmoid(-logits).sum()
        # At 1 there is no second derivative.
        nearly_one = torch.tensor(1 - 1e-12, dtype=torch.float64)
        eta = nearly_one if trusts_all else torch.sigmoid(logits)[who]
        nu = draw_log if draws else torch.tensor(-1e30)
        return (weight * pair_losses(score[left] - score[right], label, eta, nu)).sum() + prior

    def with_gradient(values: np.ndarray) -> tuple[float, np.ndarray]:
        given = torch.from_numpy(values.copy()).requires_grad_()
        loss = loss_of(given)
        (gradient,) = torch.autograd.grad(loss, given)
        return loss.item(), gradient.numpy()

    limits = {"maxiter": 10_000, "maxfun": 100_000, "ftol": 1e-15, "gtol": 1e-8, "maxcor": 30}
    values = minimize(with_gradient, np.array(first), jac=True, method="L-BFGS-B", options=limits).x
    covariance = torch.linalg.inv(
        torch.autograd.functional.hessian(loss_of, torch.from_numpy(values))
    ).numpy()
    covariance[:number] -= covariance[:number].mean(0)  # of the qualities less their mean
    covariance[:, :number] -= covariance[:, :number].mean(1, keepdims=True)
    values[:number] -= values[:number].mean()
    error = np.sqrt(np.diag(covariance))
    eta = 1 / (1 + np.exp(-values[number:-1]))
    items = dict(
        zip(names, zip(values[:number].tolist(), error[:number].tolist(), strict=True), strict=True)
    )
    reliabilities = zip(eta.tolist(), (eta * (1 - eta) * error[number:-1]).tolist(), strict=True)
    return (
        items,
        dict(zip(people, reliabilities, strict=True)),
        1 / (1 + 2 * math.exp(-values[-1])) if draws else 0.0,
    )


if __name__ == "__main__":
    run_script(main)
