"""Write the pseudo-labels of a data set.

    python export_pseudo_labels.py --train-root Dataset/train --pseudo-root pseudo-labels/daclip
    python export_pseudo_labels.py --scores daclip_scores.jsonl
    python export_pseudo_labels.py --scores daclip_export    # a folder: DA-CLIP's .pt files

The guide's teacher, DA-CLIP, is not part of this recipe. Without a file of its scores the labels
are made from the colours of the pictures.
"""

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from underwater_ir.data.datasets import list_pictures
from underwater_ir.data.pseudo_labels import COLOURS, describe, label_from, label_of_scores
from yolo_seg_ddp.data.images import ImageError, read_image
from yolo_seg_ddp.utils.config import parse_config
from yolo_seg_ddp.utils.errors import UserError, one_line, print_warning
from yolo_seg_ddp.utils.options import Options, option
from yolo_seg_ddp.utils.tensor_files import atomic_torch_save, read_tensors
from yolo_seg_ddp.utils.text import counted

LARGEST_GRID = 256  # cells on a side


@dataclass(frozen=True)
class ExportConfig(Options):
    train_root: str = option("Dataset/train", "training data: a folder with input", metavar="DIR")
    val_ref_root: str = option("Dataset/testset(ref)", "test sets with targets", metavar="DIR")
    val_nonref_root: str = option(
        "Dataset/testset(non-ref)", "test sets without targets", metavar="DIR"
    )
    pseudo_root: str = option("pseudo-labels/daclip", "folder for the labels", metavar="DIR")
    scores: str | None = option(
        None,
        "a teacher's scores: JSON lines, or a folder of .pt files (reference.md); unset: scores of "
        "the pictures' colours",
        metavar="PATH",
    )


def main() -> None:
    config = parse_config(ExportConfig, "Write the pseudo-labels of a data set.")
    parts = [(source, labels, list_pictures(source)) for source, labels in folders(config)]
    if not any(pictures for _, _, pictures in parts):
        raise UserError(
            f"no pictures below {config.train_root}/input, {config.val_ref_root} or "
            f"{config.val_nonref_root}"
        )
    if config.scores is not None:
        root = Path(config.pseudo_root)
        names = {
            str((labels / path).relative_to(root))
            for _, labels, pictures in parts
            for path in pictures
        }
        import_scores(Path(config.scores), root, names)
        return
    total = 0
    for source, labels, pictures in parts:
        for picture in pictures:
            try:
                write_label(labels, picture, read_image(source / picture))
                total += 1
            except ImageError as error:
                print_warning(f"{error}: no label")
        print(f"{source}: {counted(len(pictures), 'picture')} -> {labels} ({COLOURS})", flush=True)
    if not total:
        raise UserError(
            f"none of the pictures below {config.train_root} and the test sets can be read"
        )


def folders(config: ExportConfig) -> Iterator[tuple[Path, Path]]:
    """Yield each folder of pictures with the folder for its labels."""
    labels = Path(config.pseudo_root)
    yield Path(config.train_root) / "input", labels / "train"
    for root, name in (
        (config.val_ref_root, "testset_ref"),
        (config.val_nonref_root, "testset_nonref"),
    ):
        for folder in sorted(Path(root).iterdir()) if Path(root).is_dir() else []:
            if folder.is_dir():
                yield (
                    (folder / "input" if (folder / "input").is_dir() else folder),
                    labels / name / folder.name,
                )


def write_label(folder: Path, picture: Path, image: np.ndarray) -> None:
    """Write the label of a picture, which has the path `picture` below its root."""
    atomic_torch_save(describe(image), folder / picture.with_suffix(".pt"))


# --- a teacher's scores ---------------------------------------------------------------------------


def import_scores(file: Path, root: Path, names: Collection[str]) -> None:
    """Write the labels of a file of scores, after all of it has been checked.

    Raises UserError that names the line.
    """
    found = {name for name, _ in read_scores(file, names)}
    if missing := sorted(set(names) - found):
        raise UserError(
            f"--scores {file}: no scores of {len(missing)} of {len(names)} pictures, the first is "
            f"{missing[0]}"
        )
    source = ""
    for name, label in read_scores(file, names):
        atomic_torch_save(label, (root / name).with_suffix(".pt"))
        source = str(label["source"])
    print(f"{file}: {len(found)} pictures -> {root} ({source})", flush=True)


def read_scores(file: Path, names: Collection[str]) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield each picture's name, such as train/a.png, with its label.

    `names` are those of the data set.
    """
    if file.is_dir():
        yield from read_score_files(file, names)
        return
    header: dict[str, Any] = {}
    seen: dict[str, int] = {}
    try:
        with file.open(encoding="utf-8", errors="replace") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    record = json.loads(line)
                    if number == 1:
                        header = checked_header(record)
                        continue
                    name, label = checked_label(record, header)
                    if name not in names:
                        raise ValueError(
                            f"{name} is not a picture of the data set; expected one such as "
                            f"{min(names)}"
                        )
                    if name in seen:
                        raise ValueError(f"{name} stands in line {seen[name]} already")
                except (ValueError, TypeError, RecursionError) as error:
                    raise UserError(f"--scores {file}:{number}: {one_line(error)}") from error
                seen[name] = number
                yield name, label
    except OSError as error:
        raise UserError(f"--scores {file}: {error.strerror}") from error


def read_score_files(
    folder: Path, names: Collection[str]
) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield as `read_scores` does from the .pt files of the underwater export script of DA-CLIP.

    Each is a dictionary with `scores` (K, h, w), the cosine similarities of places, and `metadata`
    with the K `prompts`. Pictures without a file are left out.
    """
    for name in sorted(names):
        path = (folder / name).with_suffix(".pt")
        if not path.exists():
            continue
        saved = read_tensors(path, "a dictionary of scores", flag="--scores ")
        try:
            prompts = saved["metadata"]["prompts"]
            header = checked_header({"teacher": f"scores of {folder.name}", "prompts": prompts})
            yield checked_label({"picture": name, "scores": saved["scores"]}, header)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise UserError(
                f"--scores {path}: expected scores and metadata with prompts ({one_line(error)})"
            ) from error


def checked_header(record: Any) -> dict[str, Any]:
    """Return the first line. Raises ValueError."""
    _require_keys(record, {"teacher", "prompts"}, {"text_embeddings"})
    prompts = record["prompts"]
    if not isinstance(record["teacher"], str) or not record["teacher"]:
        raise ValueError('teacher: expected a name such as "DA-CLIP"')
    if (
        not isinstance(prompts, list)
        or not prompts
        or not all(isinstance(prompt, str) for prompt in prompts)
    ):
        raise ValueError('prompts: expected a list such as ["clear water", "green cast"]')
    if "text_embeddings" in record:
        return {
            **record,
            "text_embeddings": torch.as_tensor(record["text_embeddings"], dtype=torch.float32),
        }
    return dict(record)


def checked_label(record: Any, header: dict[str, Any]) -> tuple[str, dict[str, object]]:
    """Return a picture's name and its label. Raises ValueError."""
    _require_keys(record, {"picture", "scores"})
    if not isinstance(record["picture"], str):
        raise ValueError("picture: expected a path such as train/a.png")
    scores, count = np.asarray(record["scores"]), len(header["prompts"])
    shape = scores.shape
    fits = len(shape) in (1, 3) and shape[0] == count and max(shape[1:], default=1) <= LARGEST_GRID
    if not fits or scores.dtype.kind not in "if":
        raise ValueError(
            f"scores: expected {count} numbers, one for each prompt, or {count} grids of at most "
            "256 x 256"
        )
    if not (np.abs(scores) <= 1).all():  # also refuses NaN
        raise ValueError("scores: a cosine similarity is between -1 and 1")
    label = label_of_scores(
        scores.reshape(count, *(shape[1:] or (1, 1))), header["prompts"], header["teacher"]
    )
    if "text_embeddings" in header:
        label["text_embeddings"] = header["text_embeddings"]
    label_from(label)
    return record["picture"], label


def _require_keys(record: Any, needed: set[str], allowed: Collection[str] = ()) -> None:
    if not isinstance(record, dict) or not needed <= record.keys() <= {*needed, *allowed}:
        raise ValueError(f"expected an object with {' and '.join(sorted(needed))}")
