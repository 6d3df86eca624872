"""Measure the scorer with real people: their votes on photographs that it has never seen, beside
four baselines.

    git clone https://github.com/idirlab/crowdpareto ../../outputs/crowdpareto
    python crowdpareto.py                               # the table of README.md

Asudeh et al., "Crowdsourcing Pareto-optimal object finding by pairwise comparisons", CIKM 2015: 100
photographs, three criteria, five answers about each of 14,850 pairs. Each seed trains on the pairs
among 70 photographs and judges on those among the 30 others; equal files are on the same side.
"""

import re
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]  # where the package crowd_bt is
import cv2
import numpy as np
import torch
from crowd_bt.comparisons import Comparison, Comparisons, image_list
from crowd_bt.images import normalised, to_tensor, varied
from crowd_bt.infer import scores_of_tensors
from crowd_bt.loss import Answers, crowd_loss
from crowd_bt.metrics import chance_error, order_values, pair_accuracies
from crowd_bt.model import PairModel, build_scorer
from crowd_bt.options import TrainConfig
from crowd_bt.rank import fit
from crowd_bt.train import build_optimizer, cosine, eta_of, first_draw_log

from yolo_seg_ddp.data.images import read_image, resize_area
from yolo_seg_ddp.utils.config import parse_config
from yolo_seg_ddp.utils.errors import EXIT_DONE, UserError, run_script
from yolo_seg_ddp.utils.files import read_text
from yolo_seg_ddp.utils.options import Options, option

CRITERIA = ("color", "sharpness", "landscape")
VOTES_FILE, PHOTOGRAPHS = "Datasets/AMT/Raw_AMT_results.txt", "Datasets/AMT/Pictures"
NUM_UNSEEN = 30
STATISTICS_PX = 256  # longest side of the photographs from which statistics are taken
LEARNING_RATE = 5e-3


@dataclass(frozen=True)
class CrowdConfig(Options):
    repository: str = option(
        "../../outputs/crowdpareto", "a clone of github.com/idirlab/crowdpareto", metavar="DIR"
    )
    seeds: int = option(3, "seeds of the split and the training", at_least=1)
    size: int = option(64, "side of the network's input in pixels", at_least=32)
    steps: int = option(100, "steps of each training", at_least=1)


def main() -> int:
    """Print a line for each criterion and way; return the exit code."""
    config = parse_config(CrowdConfig, "Measure the scorer with real people")
    torch.set_num_threads(1)
    votes = read_votes(Path(config.repository) / VOTES_FILE)
    files = {name: Path(config.repository) / PHOTOGRAPHS / name for name in image_list(votes)}
    images = {
        name: read_image(file, min_long_side_px=STATISTICS_PX) for name, file in files.items()
    }
    pictures = {
        name: resize_area(image, config.size, config.size) for name, image in images.items()
    }
    statistics = {name: image_statistics(image) for name, image in images.items()}
    for criterion in CRITERIA:
        results = defaultdict(list)
        for seed in range(config.seeds):
            unseen = choose_unseen({name: file.read_bytes() for name, file in files.items()}, seed)
            rows = [row for row in votes if row.pair_type == criterion]
            known = [row for row in rows if row.img1 not in unseen and row.img2 not in unseen]
            of_unseen = [row for row in rows if row.img1 in unseen and row.img2 in unseen]
            weights = linear_model(known, statistics)
            ways = {
                "network": network(known, pictures, unseen, config.steps, seed),
                "linear in image statistics": {
                    name: float(statistics[name] @ weights) for name in unseen
                },
                "Laplacian": {name: float(statistics[name][-1]) for name in unseen},
                "Bradley-Terry that saw the answers": {
                    name: value for name, (value, _) in fit(of_unseen, 0.1)[0].items()
                },
            }
            for way, scores in ways.items():
                results[way].append(agreement(of_unseen, scores))
        for way, agreements in results.items():
            for what, values in zip(("right", "tau"), zip(*agreements, strict=True), strict=True):
                each = " ".join(f"{value:.3f}" for value in values)
                print(f"{criterion} | {way} | {what} {np.mean(values):.3f} ({each})", flush=True)
    print(f"each | chance | right 0.500, tau 0.000 ± {chance_error(NUM_UNSEEN):.3f} for one seed")
    return EXIT_DONE


def read_votes(file: Path) -> list[Comparison]:
    """Return the votes: each answer that a pair received, with the number of people who gave it as
    its weight.
    """
    rows = []
    for number, line in enumerate(read_text(file).splitlines(), 1):
        if not re.fullmatch(r"[0-2];\d+;\d+;[-01,]+", line):
            raise UserError(f"{file}:{number}: expected criterion;first;second;answers")
        criterion, first, second, answers = line.split(";")
        # One line has `0-1`, two answers without a comma.
        for label, people in Counter(re.findall("-1|0|1", answers)).items():
            kind = CRITERIA[int(criterion)]
            rows.append(
                Comparison(f"({first}).jpg", f"({second}).jpg", int(label), kind, float(people))
            )
    return rows


def choose_unseen(files: Mapping[str, bytes], seed: int) -> list[str]:
    """Return the names of 30 photographs, sorted; equal files are all or none among them."""
    equal = defaultdict(list)
    for name in sorted(files):
        equal[files[name]].append(name)
    groups = list(equal.values())
    unseen = list[str]()
    for number in np.random.default_rng(seed).permutation(len(groups)):
        if len(unseen) + len(groups[number]) <= NUM_UNSEEN:
            unseen += groups[number]
    return sorted(unseen)


def network(
    known: Sequence[Comparison],
    photographs: Mapping[str, np.ndarray],
    unseen: Sequence[str],
    steps: int,
    seed: int,
) -> dict[str, float]:
    """Train a small network from random weights; return the qualities of the unseen photographs,
    uint8 (S, S, 3).

    Each step scores every photograph of the pairs once and compares all pairs. All else is as in
    train.py.
    """
    torch.manual_seed(seed)
    names = image_list(known)
    comparisons = Comparisons(list(known), [], {})
    config = TrainConfig(lr=LEARNING_RATE)
    size_px = photographs[names[0]].shape[0]
    scorer = build_scorer("test_resnet", input_size=size_px)
    model = PairModel(scorer, *eta_of(config, comparisons), first_draw_log(comparisons))
    optimizer = build_optimizer(model, config)
    generator = np.random.default_rng(seed)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: cosine(step, steps))
    first, second = (
        torch.tensor([names.index(getattr(row, side)) for row in known])
        for side in ("img1", "img2")
    )
    said = torch.tensor([[row.label, row.weight] for row in known]).float()
    answers = Answers(*said.T, torch.zeros(len(known), dtype=torch.int64))
    for _ in range(steps):
        images = torch.stack(
            [to_tensor(varied(photographs[name], generator, 0.0)) for name in names]
        )
        scores = model.scorer(normalised(images))
        optimizer.zero_grad()
        crowd_loss(scores[first] - scores[second], model.eta, model.draw_log, answers)[0].backward()
        optimizer.step()
        scheduler.step()
    pictures = [to_tensor(photographs[name]) for name in unseen]
    return dict(
        zip(unseen, scores_of_tensors(scorer.eval(), pictures, torch.device("cpu")), strict=True)
    )


def image_statistics(image: np.ndarray) -> np.ndarray:
    """Return statistics of colours, contrast and edges; the last one is the log of the Laplacian's
    variance.
    """
    factor = STATISTICS_PX / max(image.shape[:2])
    image = cv2.resize(image, None, fx=factor, fy=factor, interpolation=cv2.INTER_AREA)
    grey, hsv = cv2.cvtColor(image, cv2.COLOR_RGB2GRAY), cv2.cvtColor(image, cv2.COLOR_RGB2HSV)
    laplacian = np.log1p(cv2.Laplacian(grey, cv2.CV_32F).var())
    return np.array(
        [*image.mean((0, 1)), *hsv.mean((0, 1)), *hsv.std((0, 1)), grey.std(), laplacian]
    )


def linear_model(rows: Sequence[Comparison], statistics: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return the weights of a Bradley-Terry model of the decided votes that is linear in the
    statistics.
    """
    from sklearn.linear_model import LogisticRegression

    decided = [row for row in rows if row.label]
    scale = np.std(list(statistics.values()), 0)
    inputs = np.stack([(statistics[row.img1] - statistics[row.img2]) / scale for row in decided])
    model = LogisticRegression(fit_intercept=False, max_iter=1000)
    model.fit(inputs, [row.label for row in decided], [row.weight for row in decided])
    return np.asarray(model.coef_[0] / scale)


def agreement(rows: Sequence[Comparison], scores: Mapping[str, float]) -> tuple[float, float]:
    """Return the share of pairs in the majority's order, and Kendall's τ with the order by pairs
    that a majority preferred.
    """
    sums = Counter[tuple[str, str]]()
    points = Counter[str]()
    for row in rows:
        sums[row.img1, row.img2] += row.label * round(row.weight)
    majority = [Comparison(*pair, int(np.sign(total)), "majority") for pair, total in sums.items()]
    for row in majority:
        points.update({row.img1: row.label, row.img2: -row.label})
    return pair_accuracies(majority, scores)["overall_accuracy"], order_values(scores, points)[
        "kendall_tau"
    ]


if __name__ == "__main__":
    run_script(main)
