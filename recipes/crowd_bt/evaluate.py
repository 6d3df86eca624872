"""Evaluate a trained scorer on comparisons, and against a known order where there is one.

python evaluate.py --checkpoint results/best_model.pt --data-dir data --image-dir data/images
"""

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]  # where the package crowd_bt is

from crowd_bt.comparisons import SPLITS, image_list, load_local, load_prepared, write_json
from crowd_bt.metrics import evaluation, evaluation_lines
from crowd_bt.model import load_scorer
from crowd_bt.options import BEST_MODEL, DATA_DIR, IMAGE_DIR
from crowd_bt.scoring import image_loader, score_images

from yolo_seg_ddp.utils.config import parse_config
from yolo_seg_ddp.utils.devices import choose_device, choose_precision
from yolo_seg_ddp.utils.errors import EXIT_DONE, run_script
from yolo_seg_ddp.utils.options import Options, option


@dataclass(frozen=True)
class EvaluateConfig(Options):
    checkpoint: str = option(f"results/{BEST_MODEL}", "trained model", metavar="FILE")
    backbone: str | None = option(
        None, "must be the checkpoint's, which is the default", metavar="NAME"
    )
    input_size: int | None = option(
        None, "side of the input in pixels; unset: the checkpoint's", at_least=32
    )
    device: str = option("auto", "auto, cuda or cpu")
    image_dir: str = option(IMAGE_DIR, "folder of the images", metavar="DIR")
    data_dir: str = option(
        DATA_DIR, "folder of the lists", metavar="DIR", wants="not prepared_data_dir"
    )
    prepared_data_dir: str | None = option(
        None, "folder in the prepared format, instead of --data-dir", metavar="DIR"
    )
    split: str = option("val", "which comparisons", choices=SPLITS)
    output: str = option("evaluation_results.json", "file for the result", metavar="FILE")
    batch_size: int = option(64, "images scored at once", at_least=1)
    num_workers: int = option(0, "loader processes", at_least=0)
    seed: int = option(
        42, "seed of the split, as in training", at_least=0, wants="not prepared_data_dir"
    )


def main() -> int:
    """Evaluate; return the exit code."""
    config = parse_config(EvaluateConfig, "Evaluate the Crowd-BT quality scorer")
    device = choose_device(config.device, 0)
    images = Path(config.image_dir)
    scorer, settings = load_scorer(config.checkpoint, device, config.backbone, config.input_size)
    if config.prepared_data_dir is not None:
        comparisons = load_prepared(Path(config.prepared_data_dir), images, print)
    else:
        comparisons = load_local(Path(config.data_dir), images, config.seed, print)
    rows = comparisons.of(config.split)
    names = image_list(rows)
    loader = image_loader(
        names, images, settings["input_size"], config.batch_size, config.num_workers
    )
    scores = score_images(scorer, loader, names, device, choose_precision("off", device))
    results = evaluation(rows, scores, comparisons.known_order)
    print(
        f"{config.checkpoint} on {len(rows)} comparisons ({config.split}) of {len(names)} images:"
    )
    print("\n".join(evaluation_lines(results)))
    content = {"checkpoint": config.checkpoint, "split": config.split, **results, "scores": scores}
    write_json(Path(config.output), content)
    print(f"Written to {config.output}")
    return EXIT_DONE


if __name__ == "__main__":
    run_script(main)
