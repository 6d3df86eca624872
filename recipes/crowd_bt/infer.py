"""Score one image, rank a folder of images, or compare two.

python infer.py --image photo.jpg
python infer.py --image-dir photos --output ranking.json
python infer.py --compare first.jpg second.jpg
"""

import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]  # where the package crowd_bt is
import torch
from crowd_bt.comparisons import write_json
from crowd_bt.images import IMAGE_SUFFIXES, image_files, load_image, normalised, to_tensor
from crowd_bt.model import QualityScorer, load_scorer
from crowd_bt.options import BEST_MODEL

from yolo_seg_ddp.utils.config import parse_config
from yolo_seg_ddp.utils.devices import choose_device
from yolo_seg_ddp.utils.errors import (
    EXIT_DONE,
    UsageError,
    UserError,
    print_warning,
    printable,
    run_script,
)
from yolo_seg_ddp.utils.options import Options, option

SHOWN = 10  # images of a ranking that are printed at either end


@dataclass(frozen=True)
class InferConfig(Options):
    checkpoint: str = option(f"results/{BEST_MODEL}", "trained model", metavar="FILE")
    image: str | None = option(None, "score this image", metavar="FILE")
    image_dir: str | None = option(
        None, "rank the images in this folder and below it", metavar="DIR"
    )
    compare: tuple[str, ...] | None = option(None, "compare these two images", metavar="FILE")
    output: str | None = option(None, "JSON file for the result", metavar="FILE")
    backbone: str | None = option(
        None, "must be the checkpoint's, which is the default", metavar="NAME"
    )
    input_size: int | None = option(
        None, "side of the input in pixels; unset: the checkpoint's", at_least=32
    )
    device: str = option("auto", "auto, cuda or cpu")
    batch_size: int = option(
        32, "images of a folder that are scored at once", at_least=1, needs="image_dir"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if sum(wish is not None for wish in (self.image, self.image_dir, self.compare)) != 1:
            raise UsageError("name one of --image FILE, --image-dir DIR and --compare FILE FILE")
        if self.compare is not None and len(self.compare) != 2:
            raise UsageError(f"--compare takes two images, not {len(self.compare)}")


def main() -> int:
    """Score what the options name; return the exit code."""
    config = parse_config(InferConfig, "Score images with the Crowd-BT quality scorer")
    device = choose_device(config.device, 0)
    scorer, settings = load_scorer(config.checkpoint, device, config.backbone, config.input_size)
    size_px = settings["input_size"]
    result: dict[str, Any]
    if config.image is not None:
        (quality,) = scores_of(scorer, [Path(config.image)], size_px, device)
        result = {"image": config.image, "score": quality}
        print(f"{config.image}: quality {quality:.4f}")
    elif config.compare is not None:
        result = compared(
            config.compare,
            scores_of(scorer, [Path(name) for name in config.compare], size_px, device),
        )
    else:
        result = ranked(scorer, Path(str(config.image_dir)), size_px, config.batch_size, device)
    if config.output is not None:
        write_json(Path(config.output), result)
        print(f"Written to {config.output}")
    return EXIT_DONE


def scores_of(
    scorer: QualityScorer, files: list[Path], size_px: int, device: torch.device
) -> list[float]:
    """Return the qualities of images. Raises UserError for one that cannot be read."""
    return scores_of_tensors(
        scorer, [to_tensor(load_image(file, size_px)) for file in files], device
    )


@torch.no_grad()
def scores_of_tensors(
    scorer: QualityScorer, images: list[torch.Tensor], device: torch.device
) -> list[float]:
    """Return the qualities of RGB images uint8 (3, S, S)."""
    return [float(score) for score in scorer(normalised(torch.stack(images).to(device)))]


def compared(names: tuple[str, ...], scores: list[float]) -> dict[str, Any]:
    """Print and return which of two images is better, with the probability σ(difference) of the
    Bradley-Terry model.
    """
    difference = scores[0] - scores[1]
    first_wins = 1 / (1 + math.exp(-difference)) if difference > -700 else 0.0
    better = 0 if difference >= 0 else 1
    for name, score in zip(names, scores, strict=True):
        print(f"{name}: quality {score:.4f}")
    print(f"{names[better]} is better with probability {max(first_wins, 1 - first_wins):.1%}")
    return {
        "images": list(names),
        "scores": scores,
        "difference": difference,
        "probability_first_is_better": first_wins,
        "better": names[better],
    }


def ranked(
    scorer: QualityScorer, folder: Path, size_px: int, batch_size: int, device: torch.device
) -> dict[str, Any]:
    """Print and return the images of a folder, best first, and those that cannot be read.

    Raises UserError when there are none.
    """
    files = image_files(folder)
    scores: dict[str, float] = {}
    unreadable: list[str] = []
    for start in range(0, len(files), batch_size):
        images: dict[str, torch.Tensor] = {}
        for file in files[start : start + batch_size]:
            try:
                images[str(file)] = to_tensor(load_image(file, size_px))
            except UserError as error:
                unreadable.append(str(file))
                print_warning(str(error).partition(";")[0])
        if images:
            scores.update(
                zip(images, scores_of_tensors(scorer, list(images.values()), device), strict=True)
            )
    if not scores:
        raise UserError(f"{folder}: no image that can be read ({', '.join(IMAGE_SUFFIXES)})")
    ranking = sorted(scores, key=lambda name: (-scores[name], name))
    shown = ranking if len(ranking) <= 2 * SHOWN else [*ranking[:SHOWN], "", *ranking[-SHOWN:]]
    numbers = {name: number for number, name in enumerate(ranking, 1)}
    for name in shown:
        print(
            f"{numbers[name]:5d}  {scores[name]:9.4f}  {printable(name, 200)}" if name else "  ..."
        )
    return {
        "ranking": [{"image": name, "score": scores[name]} for name in ranking],
        "unreadable": unreadable,
    }


if __name__ == "__main__":
    run_script(main)
