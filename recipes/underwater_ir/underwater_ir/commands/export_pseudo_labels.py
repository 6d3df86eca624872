"""Write the pseudo-labels of a data set.

    python export_pseudo_labels.py --train-root Dataset/train --pseudo-root pseudo-labels/daclip

The guide's teacher, DA-CLIP, is not part of this recipe: the labels come from the colours of the pictures.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from underwater_ir.data.datasets import list_pictures
from underwater_ir.data.pseudo_labels import describe
from utils.common.config import Options, option, parse_config
from utils.common.errors import UserError, print_warning
from utils.common.tensor_files import atomic_torch_save
from utils.data.images import ImageError, read_image


@dataclass(frozen=True)
class ExportConfig(Options):
    train_root: str = option("Dataset/train", "training data: a folder with input", metavar="DIR")
    val_ref_root: str = option("Dataset/testset(ref)", "test sets with targets", metavar="DIR")
    val_nonref_root: str = option("Dataset/testset(non-ref)", "test sets without targets", metavar="DIR")
    pseudo_root: str = option("pseudo-labels/daclip", "folder for the labels", metavar="DIR")


def main() -> None:
    config = parse_config(ExportConfig, "Write the pseudo-labels of a data set.")
    total = 0
    for source, labels in folders(config):
        pictures = list_pictures(source)
        for picture in pictures:
            try:
                write_label(labels, picture, read_image(source / picture))
                total += 1
            except ImageError as error:
                print_warning(f"{error}: no label")
        print(f"{source}: {len(pictures)} pictures -> {labels}", flush=True)
    if not total:
        raise UserError(
            f"no pictures below {config.train_root}/input, {config.val_ref_root} or {config.val_nonref_root}"
        )


def folders(config: ExportConfig) -> Iterator[tuple[Path, Path]]:
    """Yield each folder of pictures with the folder for its labels."""
    labels = Path(config.pseudo_root)
    yield Path(config.train_root) / "input", labels / "train"
    for root, name in ((config.val_ref_root, "testset_ref"), (config.val_nonref_root, "testset_nonref")):
        for folder in sorted(Path(root).iterdir()) if Path(root).is_dir() else []:
            if folder.is_dir():
                yield (folder / "input" if (folder / "input").is_dir() else folder), labels / name / folder.name


def write_label(folder: Path, picture: Path, image: np.ndarray) -> None:
    """Write the label of a picture, which has the path `picture` below its root."""
    atomic_torch_save(describe(image), folder / picture.with_suffix(".pt"))
