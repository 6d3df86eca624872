"""Agreement of qualities with answers, and with a known order."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from crowd_bt.comparisons import GOLD, Comparison, Comparisons
from crowd_bt.loss import DRAW_BELOW, EPSILON, pair_losses

from yolo_seg_ddp.utils.errors import UserError, printable

Scores = Mapping[str, float]  # an image's quality by its name


def validation_values(
    rows: Sequence[Comparison], scores: Scores, eta: float | Mapping[str, float], draw_log: float
) -> dict[str, float]:
    """Return loss and weighted accuracy with draws, as in training, and the accuracy of gold pairs
    if there are any.

    `eta` is the crowd's reliability, or each annotator's by name; `draw_log` the log of Davidson's
    ν.
    """
    difference = _differences(rows, scores)
    label = _labels(rows)
    weight = np.array([row.weight for row in rows])
    etas = np.array([eta[row.annotator] if isinstance(eta, Mapping) else eta for row in rows])
    losses = pair_losses(
        *map(torch.from_numpy, (difference, label, etas)), torch.tensor(draw_log)
    ).numpy()
    is_right = np.sign(difference) * (np.abs(difference) > DRAW_BELOW) == label
    total = weight.sum() + EPSILON
    values = {
        "val_loss": float((weight * losses).sum() / total),
        "val_accuracy": float((weight * is_right).sum() / total),
    }
    gold = pair_accuracies(rows, scores)["by_pair_type"].get(GOLD)
    return values | ({"val_gold_accuracy": gold["accuracy"]} if gold and gold["total"] else {})


def pair_accuracies(rows: Sequence[Comparison], scores: Scores) -> dict[str, Any]:
    """Return accuracy, counts and mean |d| of each pair type, gold first, and of all; draws do not
    count as pairs.
    """
    difference = _differences(rows, scores)
    label = _labels(rows)
    is_right = np.sign(difference) == label
    is_decided = label != 0
    kinds = np.array([row.pair_type for row in rows])

    def counted(decided: np.ndarray) -> tuple[float | None, dict[str, int]]:
        correct = int(is_right[decided].sum())
        total = int(decided.sum())
        return correct / total if total else None, {"correct": correct, "total": total}

    table: dict[str, dict[str, Any]] = {}
    for kind in sorted(set(kinds.tolist()), key=lambda name: (name != GOLD, name)):
        decided = is_decided & (kinds == kind)
        accuracy, counts = counted(decided)
        margin = float(np.abs(difference[decided]).mean()) if counts["total"] else None
        counts["num_comparisons"] = int((kinds == kind).sum())
        table[kind] = {"accuracy": accuracy, **counts, "mean_margin": margin}
    overall, counts = counted(is_decided)
    gold = table.get(GOLD, {}).get("accuracy")
    return {
        "gold_gold_accuracy": gold,
        "overall_accuracy": overall,
        **counts,
        "by_pair_type": table,
    }


def order_values(scores: Scores, known: Mapping[str, float]) -> dict[str, float]:
    """Return measures of agreement between the order by score and the known order; empty for fewer
    than two such images.

    `order_accuracy` is the share of image pairs of different known quality that the scores put in
    the right order. Kendall's τ is τ-b: with tied known qualities it stays below 1 even for a
    perfect order, at `most_kendall_tau`.
    """
    names = sorted(scores.keys() & known.keys())
    score, truth = (np.array([float(values[name]) for name in names]) for values in (scores, known))
    if len(names) < 2 or truth.min() == truth.max():
        return {}
    try:
        # Their import takes a second.
        from scipy.stats import kendalltau, spearmanr
    except ImportError as error:
        raise UserError(
            "scipy is missing: pip install -r requirements.txt in this folder"
        ) from error
    above = np.sign(truth[:, None] - truth) > 0  # (N, N): row is better than column
    right = np.sign(score[:, None] - score)[above] > 0
    number = len(names)
    return {
        "order_accuracy": float(right.mean()),
        "kendall_tau": float(kendalltau(score, truth).statistic),
        "spearman_rho": float(spearmanr(score, truth).statistic),
        "most_kendall_tau": float(2 * above.sum() / (number * (number - 1))) ** 0.5,
        "chance_error": chance_error(number),
        "num_images": number,
    }


def chance_error(number: int) -> float:
    """Return the standard deviation of Kendall's τ for an order by chance; its mean is 0 (Kendall
    1938).
    """
    return float(((4 * number + 10) / (9 * number * (number - 1))) ** 0.5)


def evaluation(
    rows: Sequence[Comparison], scores: Scores, known: Mapping[str, float]
) -> dict[str, Any]:
    """Return the final evaluation: gold pairs first, then all, each pair type, and the known order
    where there is one.
    """
    order = order_values(scores, known)
    return {**pair_accuracies(rows, scores), **({"known_order": order} if order else {})}


def annotator_table(
    comparisons: Comparisons, eta: Mapping[str, float]
) -> dict[str, dict[str, float | None]]:
    """Return each annotator's reliability η, the measured one and the number of training
    comparisons, least reliable first.
    """
    counts = Counter(row.annotator for row in comparisons.train)
    measured = comparisons.measured
    return {
        name: {"eta": eta[name], "measured": measured[name], "num_comparisons": counts[name]}
        for name in sorted(eta, key=lambda name: eta[name])
    }


def evaluation_lines(results: dict[str, Any]) -> list[str]:
    """Return the lines of an evaluation for the console."""
    lines = [f"  Gold-gold accuracy without draws: {_percent(results['gold_gold_accuracy'])}"]
    lines.append(
        f"  Overall accuracy without draws: {_percent(results['overall_accuracy'])} "
        f"({results['correct']} of {results['total']})"
    )
    for kind, row in results["by_pair_type"].items():
        margin = "" if row["mean_margin"] is None else f", mean margin {row['mean_margin']:.3f}"
        lines.append(
            f"    {kind}: {_percent(row['accuracy'])} ({row['correct']} of {row['total']}){margin}"
        )
    if annotators := results.get("annotators"):
        names = list(annotators)
        ends = " to ".join(
            f"{annotators[name]['eta']:.2f} ({printable(name)})" for name in (names[0], names[-1])
        )
        lines.append(f"  Reliability of {len(names)} annotators: {ends}")
    if order := results.get("known_order"):
        lines.append(
            f"  Known order of {order['num_images']} images: accuracy "
            f"{_percent(order['order_accuracy'])}, "
            f"Kendall tau {order['kendall_tau']:.3f}, Spearman rho {order['spearman_rho']:.3f}"
        )
        lines.append(
            f"  A Kendall tau of 0 ± {order['chance_error']:.2f} is chance, "
            f"{order['most_kendall_tau']:.2f} a perfect order"
        )
    return lines


def _differences(rows: Sequence[Comparison], scores: Scores) -> np.ndarray:
    return np.array([float(scores[row.img1]) - float(scores[row.img2]) for row in rows])


def _labels(rows: Sequence[Comparison]) -> np.ndarray:
    return np.array([row.label for row in rows])


def _percent(share: float | None) -> str:
    return "no decided pairs" if share is None else f"{share:.1%}"
