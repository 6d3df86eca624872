"""Measure the value of annotators' reliabilities: Kendall's tau on unseen pictures, for four ways to treat the annotators.

    python measure.py                  # eight seeds, the table of README.md

The scorer has fixed features (the mean magnitude of each coefficient of the 8 x 8 cosine transform) instead of a network:
a training takes seconds, and random starts do not hide the difference. All else is as in train.py.
"""

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]  # where the package crowd_bt is
import cv2
import numpy as np
import torch
from crowd_bt.comparisons import Comparisons, load_prepared, read_known_order
from crowd_bt.images import load_image
from crowd_bt.loss import Answers
from crowd_bt.make_data import MakeConfig, make
from crowd_bt.metrics import order_values, validation_values
from crowd_bt.model import PairModel, QualityScorer
from crowd_bt.options import TrainConfig
from crowd_bt.task import PairComparison
from crowd_bt.train import build_optimizer, cosine, eta_of
from torch import nn

from utils.common.config import Options, option, parse_config
from utils.common.errors import EXIT_DONE, run_script

SIZE_PX, BLOCK_PX = 48, 8
LIARS: dict[str, Any] = {"guessing": 0.25, "lying": 0.25}
CROWDS: dict[str, dict[str, Any]] = {
    "gold pairs; a third guesses": {},
    "gold pairs; a quarter guesses, a quarter lies": LIARS,
    "no gold pairs; a quarter guesses, a quarter lies": {**LIARS, "gold": False},
}
HALVED = "r is taken for 2 eta - 1"
WAYS: dict[str, dict[str, Any]] = {
    "Bradley-Terry": {"loss": "bradley-terry"},
    HALVED: {"learnable_eta": False},
    "fixed: eta = r": {"learnable_eta": False},
    "joint": {},
}
Features = dict[str, torch.Tensor]  # an image's features (192,) by its name


@dataclass(frozen=True)
class MeasureConfig(Options):
    seeds: int = option(8, "seeds of data and training", at_least=1)
    per_annotator: int = option(125, "comparisons of each of twelve annotators", at_least=10)
    epochs: int = option(10, "passes over the training pairs", at_least=1)
    lr: float = option(1e-3, "learning rate of the scorer", above=0)


def main() -> int:
    """Print a line for each crowd and way; return the exit code."""
    config = parse_config(MeasureConfig, "Measure four ways to treat annotators")
    torch.set_num_threads(1)
    for crowd, facts in CROWDS.items():
        taus: dict[str, list[float]] = {way: [] for way in WAYS}
        for seed in range(config.seeds):
            with tempfile.TemporaryDirectory() as place:
                data = Path(place) / "data"
                pictures = {"size": SIZE_PX, "num_pictures": 500, "comparisons": 60, "seed": seed}
                make(MakeConfig(output=str(data), per_annotator=config.per_annotator, **pictures, **facts))
                seen, unseen = (features_of(folder / "images") for folder in (data, data / "unseen"))
                for way, found in taus.items():
                    options = TrainConfig(epochs=config.epochs, batch_size=32, lr=config.lr, seed=seed, **WAYS[way])
                    learns = {"learns_eta": options.learns_eta}
                    comparisons = load_prepared(data / "prepared", data / "images", lambda line: None, **learns)
                    scores = train(options, comparisons, seen, unseen, is_halved=way == HALVED)
                    found.append(order_values(scores, read_known_order(data / "unseen"))["kendall_tau"])
        for way, found in taus.items():
            error = np.std(found) / max(len(found) - 1, 1) ** 0.5
            each = " ".join(f"{tau:.3f}" for tau in found)
            print(f"{crowd} | {way} | tau {np.mean(found):.3f} ± {error:.3f} | {each}", flush=True)
    return EXIT_DONE


def features_of(folder: Path) -> Features:
    """Return the log of 1 + mean |coefficient| over all blocks of each image in a folder, by its name."""
    basis, number = cv2.dct(np.eye(BLOCK_PX), flags=cv2.DCT_ROWS).T, SIZE_PX // BLOCK_PX  # a row is a frequency
    found = {}
    for file in folder.iterdir():
        blocks = load_image(file, SIZE_PX).reshape(number, BLOCK_PX, number, BLOCK_PX, 3)
        magnitudes = np.abs(np.einsum("ui,aibjc,vj->abuvc", basis, blocks, basis, optimize=True)).mean((0, 1))
        found[file.name] = torch.from_numpy(np.log1p(magnitudes).ravel()).float()
    return found


def train(
    config: TrainConfig, comparisons: Comparisons, seen: Features, unseen: Features, *, is_halved: bool
) -> dict[str, float]:
    """Train as train.py does; return the unseen images' scores by the model of the best epoch."""
    torch.manual_seed(config.seed)
    inputs = torch.stack(list(seen.values()))
    mean, deviation = inputs.mean(0), inputs.std(0)
    places = {name: number for number, name in enumerate(seen)}
    names = {name: number for number, name in enumerate(comparisons.measured)}
    rows = comparisons.train
    pairs = torch.tensor([[places[row.img1], places[row.img2]] for row in rows])
    said = torch.tensor([[row.label, row.weight] for row in rows]).float()
    who = torch.tensor([names[row.annotator] for row in rows])
    eta, is_learned = eta_of(config, comparisons)
    if is_halved and isinstance(eta, list):
        eta = [(1 + own) / 2 for own in eta]
    model = PairModel(QualityScorer(nn.Identity(), inputs.shape[1]), eta, is_learned)
    task, optimizer, best, lowest = PairComparison(comparisons, {}), build_optimizer(model, config), {}, float("inf")
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: cosine(epoch, config.epochs))
    for _ in range(config.epochs):
        model.train()
        for batch in torch.randperm(len(rows)).split(config.batch_size):
            answers = Answers(*said[batch].T, who[batch])
            optimizer.zero_grad()
            task.loss(model((inputs[pairs[batch]] - mean) / deviation), answers)[0].backward()
            optimizer.step()
        scheduler.step()
        model.eval()
        seen_scores, unseen_scores = (scores_of(model, images, mean, deviation) for images in (seen, unseen))
        value = validation_values(comparisons.val, seen_scores, task.eta_of(model))["val_loss"]
        if value < lowest:
            best, lowest = unseen_scores, value
    return best


@torch.no_grad()
def scores_of(model: PairModel, images: Features, mean: torch.Tensor, deviation: torch.Tensor) -> dict[str, float]:
    scores = model.scorer((torch.stack(list(images.values())) - mean) / deviation)
    return dict(zip(images, scores.tolist(), strict=True))


if __name__ == "__main__":
    run_script(main)
