"""Compare the student with its input, grey world and CLAHE on the test sets.

python evaluate.py --model experiments/daclip_student_ddp.pt --img-size 256
python evaluate.py --model seed0.pt seed1.pt seed2.pt           # the mean of three students
python evaluate.py --model fold1.pt ... fold5.pt --folds 5      # also on the pairs left out
"""

import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from underwater_ir.data.datasets import (
    RestorationDataset,
    benchmark_entries,
    create_evaluation_loader,
    shares_by_scene,
    train_entries,
)
from underwater_ir.filters import clahe, grey_world
from underwater_ir.student.network import SIZE_MULTIPLE, Outputs, read_student
from underwater_ir.student.restoration import (
    METRICS,
    REFERENCE,
    measure,
    sets_of,
    summarise,
    to_pixels,
)
from yolo_seg_ddp.data.images import write_jpeg
from yolo_seg_ddp.utils.config import parse_config
from yolo_seg_ddp.utils.devices import choose_device
from yolo_seg_ddp.utils.errors import UserError
from yolo_seg_ddp.utils.files import write_text_atomic
from yolo_seg_ddp.utils.options import Options, option
from yolo_seg_ddp.utils.text import format_table

PICTURES_PER_SET = 6  # on the sheets
SHOWN = ("input", "grey world + CLAHE", "student")  # on the sheets


@dataclass(frozen=True)
class EvaluateConfig(Options):
    model: tuple[str, ...] = option(
        ("student_model.pt",), "weights of one or more students", metavar="FILE"
    )
    val_ref_root: str = option("Dataset/testset(ref)", "test sets with targets", metavar="DIR")
    val_nonref_root: str = option(
        "Dataset/testset(non-ref)", "test sets without targets", metavar="DIR"
    )
    pseudo_root: str = option(
        "pseudo-labels/daclip", "labels: testset_ref/SET, testset_nonref/SET", metavar="DIR"
    )
    img_size: int = option(
        256, "side of the pictures, as in training", at_least=16, multiple_of=SIZE_MULTIPLE
    )
    folds: int | None = option(
        None,
        "the models are those of --fold 1 to N, seed by seed; each is evaluated on the "
        "pairs of --train-root that it left out",
        at_least=2,
    )
    train_root: str = option(
        "Dataset/train", "training pairs of --fold", metavar="DIR", needs="folds"
    )
    device: str = option("auto", "auto, cpu, cuda or cuda:N")
    output: str | None = option(
        None, "folder for metrics.json and a sheet of pictures for each set", metavar="DIR"
    )


class Filter(nn.Module):
    """Restores by a function of one picture, RGB uint8 (H, W, 3): the input, or a student's."""

    def __init__(
        self, restore: Callable[[np.ndarray], np.ndarray], student: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.restore = restore
        self.student = student

    def forward(self, inputs: dict[str, torch.Tensor]) -> Outputs:
        pictures = inputs["picture"] if self.student is None else self.student(inputs).picture
        restored = np.stack([self.restore(to_pixels(picture)) for picture in pictures])
        nothing = torch.zeros(len(restored), 1)
        tensors = torch.from_numpy(restored).permute(0, 3, 1, 2) / 255
        return Outputs(tensors.to(inputs["picture"].device), nothing, nothing, None)


@torch.inference_mode()
def main() -> None:
    config = parse_config(
        EvaluateConfig, "Compare the student with its input, grey world and CLAHE."
    )
    device = choose_device(config.device, 0)
    students = [read_student(Path(file)).to(device) for file in config.model]
    if any(student.label_shape != students[0].label_shape for student in students):
        raise UserError(
            f"--model {' '.join(config.model)}: the students learned from labels of different "
            "shapes"
        )
    labels = Path(config.pseudo_root)
    entries = benchmark_entries(Path(config.val_ref_root), labels / "testset_ref", True)
    entries += benchmark_entries(Path(config.val_nonref_root), labels / "testset_nonref", False)
    folds = config.folds or 1
    if len(students) % folds:
        raise UserError(f"--folds {folds}: {len(students)} models are not {folds} for each seed")
    fold_of: list[int] = []  # each pair of --train-root
    if config.folds is not None:
        pairs = train_entries(Path(config.train_root), labels / "train")
        shares = shares_by_scene(pairs, Path(config.train_root) / "input", folds)
        fold_of = [number for number, share in enumerate(shares) for _ in share]
        entries = [*itertools.chain.from_iterable(shares), *entries]
    if not entries:
        raise UserError(
            f"no test set in {config.val_ref_root} or {config.val_nonref_root}; python "
            "make_data.py makes some"
        )
    dataset = RestorationDataset(entries, config.img_size, students[0].label_shape)
    methods: dict[str, list[nn.Module]] = {
        "input": [Filter(lambda image: image)],
        "grey world": [Filter(grey_world)],
        "CLAHE": [Filter(clahe)],
        "grey world + CLAHE": [Filter(lambda image: clahe(grey_world(image)))],
        "student": [*students],
        "student + CLAHE": [Filter(lambda image: clahe(image, 0.5), one) for one in students],
    }
    values = {
        method: np.stack(
            [
                measure(one, dataset, create_evaluation_loader(dataset, 1), device)
                for one in networks
            ]
        )
        for method, networks in methods.items()
    }  # each (networks, N, METRICS)
    for method in ("student", "student + CLAHE"):
        of_seeds = values[method].reshape(-1, folds, *values[method].shape[1:])
        values[method] = of_seeds.mean(1)
        values[method][:, : len(fold_of)] = of_seeds[:, fold_of, range(len(fold_of))]
    results: dict[str, dict[str, Any]] = {
        method: {**summarise(dataset, found.mean(0)), "sets": {}, "spread": {}}
        for method, found in values.items()
    }
    for (name, has_target), indices in sets_of(dataset).items():
        title = f"[{'Ref' if has_target else 'Non-Ref'}] {name}"
        metrics = METRICS if has_target else METRICS[len(REFERENCE) :]
        rows = []
        for method, found in values.items():
            of_networks = found[:, indices, -len(metrics) :].mean(1)  # (networks, metrics)
            means, spread = (
                of_networks.mean(0).tolist(),
                of_networks.std(0, ddof=len(found) > 1).tolist(),
            )
            results[method]["sets"][title] = dict(zip(metrics, means, strict=True))
            results[method]["spread"][title] = dict(zip(metrics, spread, strict=True))
            shown = zip(means, spread, strict=True)
            rows.append(
                [
                    method,
                    *(f"{mean:.3f}" + f" ± {one:.3f}" * (len(found) > 1) for mean, one in shown),
                ]
            )
        header = ["", *(metric.upper().replace("_", ", ") for metric in metrics)]
        print(f"\n{title}, {len(indices)} pictures", format_table(header, rows), sep="\n")
    if config.output is not None:
        folder = Path(config.output)
        folder.mkdir(parents=True, exist_ok=True)
        write_text_atomic(folder / "metrics.json", json.dumps(results, indent=2))
        write_sheets(folder, dataset, methods, device)


def write_sheets(
    folder: Path,
    dataset: RestorationDataset,
    methods: dict[str, list[nn.Module]],
    device: torch.device,
) -> None:
    """Write a picture for each set: a column for each photograph; rows: SHOWN, then the target."""
    for (name, has_target), indices in sets_of(dataset).items():
        columns = []
        for index in indices[:PICTURES_PER_SET]:
            sample = {
                key: value.to(device)
                for key, value in dataset.collate([dataset[(0, index)]]).items()
            }
            rows = [to_pixels(methods[method][0](sample).picture[0]) for method in SHOWN]
            columns.append(
                np.concatenate([*rows, *([to_pixels(sample["target"][0])] if has_target else [])])
            )
        path = folder / f"{name}.jpg"
        write_jpeg(path, np.concatenate(columns, 1))
        print(f"{path}: rows are {', '.join(SHOWN)}{', target' if has_target else ''}")
