"""A data set of small noise, for trainings whose results nobody looks at."""

from pathlib import Path

import numpy as np

from yolo_seg_ddp.data.images import encode_jpeg


def write_noise_data(folder: Path) -> Path:
    """Write 20 photographs for training and 6 for validation; return the YAML of the data set."""
    rng = np.random.default_rng(0)
    for split, count in (("train", 20), ("val", 6)):
        for kind in ("images", "labels"):
            (folder / split / kind).mkdir(parents=True)
        for number in range(count):
            picture = rng.integers(0, 255, (48, 64, 3), dtype=np.uint8)
            (folder / split / "images" / f"{number}.jpg").write_bytes(encode_jpeg(picture))
            (folder / split / "labels" / f"{number}.txt").write_text("0 0.1 0.1 0.6 0.1 0.6 0.7\n")
    (folder / "data.yaml").write_text("train: train/images\nval: val/images\nnames: [pole]\n")
    return folder / "data.yaml"
