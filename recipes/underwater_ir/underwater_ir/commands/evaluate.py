"""Compare the student with its input and with a classical restoration on the test sets.

python evaluate.py --model experiments/daclip_student_ddp.pt --img-size 256
"""

import json
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
import torch
from torch import nn

from underwater_ir.commands.restore import read_student
from underwater_ir.data.datasets import RestorationDataset, benchmark_entries, create_evaluation_loader
from underwater_ir.student.network import SIZE_MULTIPLE, Outputs
from underwater_ir.student.restoration import NO_REFERENCE, REFERENCE, measure, sets_of, summarise, to_pixels
from utils.common.config import Options, option, parse_config
from utils.common.devices import choose_device
from utils.common.errors import UserError
from utils.common.files import write_text_atomic
from utils.common.text import format_table
from utils.data.images import write_jpeg

CLAHE_LIMIT, CLAHE_TILES = 2.0, (8, 8)  # OpenCV's tutorial values
PICTURES_PER_SET = 6  # on the sheets


@dataclass(frozen=True)
class EvaluateConfig(Options):
    model: str = option("student_model.pt", "weights that training wrote to --save-path", metavar="FILE")
    val_ref_root: str = option("Dataset/testset(ref)", "test sets with targets", metavar="DIR")
    val_nonref_root: str = option("Dataset/testset(non-ref)", "test sets without targets", metavar="DIR")
    pseudo_root: str = option("pseudo-labels/daclip", "labels: testset_ref/SET, testset_nonref/SET", metavar="DIR")
    img_size: int = option(256, "side of the pictures, as in training", at_least=16, multiple_of=SIZE_MULTIPLE)
    device: str = option("auto", "auto, cpu, cuda or cuda:N")
    output: str | None = option(None, "folder for metrics.json and a sheet of pictures for each set", metavar="DIR")


class Unchanged(nn.Module):
    """Returns its input."""

    def forward(self, inputs: dict[str, torch.Tensor]) -> Outputs:
        nothing = torch.zeros(len(inputs["picture"]), 1)
        return Outputs(inputs["picture"], nothing, nothing, None)


class Classical(Unchanged):
    """White balance by the grey-world rule, then CLAHE on the lightness (Zuiderveld, Graphics Gems IV, 1994)."""

    def forward(self, inputs: dict[str, torch.Tensor]) -> Outputs:
        restored = [classical(to_pixels(picture)) for picture in inputs["picture"]]
        tensors = torch.from_numpy(np.stack(restored)).permute(0, 3, 1, 2) / 255
        return super().forward({"picture": tensors.to(inputs["picture"].device)})


def classical(image: np.ndarray) -> np.ndarray:
    """Restore RGB uint8 (H, W, 3) by white balance and CLAHE."""
    means = image.mean((0, 1))
    balanced = np.clip(image * (means.mean() / np.maximum(means, 1)), 0, 255).astype(np.uint8)
    lab = cv2.cvtColor(balanced, cv2.COLOR_RGB2LAB)
    lab[..., 0] = cv2.createCLAHE(CLAHE_LIMIT, CLAHE_TILES).apply(np.ascontiguousarray(lab[..., 0]))
    return cv2.cvtColor(lab, cv2.COLOR_LAB2RGB)


@torch.inference_mode()
def main() -> None:
    config = parse_config(EvaluateConfig, "Compare the student with its input and with a classical restoration.")
    device = choose_device(config.device, 0)
    student = read_student(Path(config.model)).to(device)
    labels = Path(config.pseudo_root)
    entries = benchmark_entries(Path(config.val_ref_root), labels / "testset_ref", True)
    entries += benchmark_entries(Path(config.val_nonref_root), labels / "testset_nonref", False)
    if not entries:
        raise UserError(
            f"no test set in {config.val_ref_root} or {config.val_nonref_root}; python make_data.py makes some"
        )
    dataset = RestorationDataset(entries, config.img_size, student.label_shape)
    methods: dict[str, nn.Module] = {"input": Unchanged(), "white balance + CLAHE": Classical(), "student": student}
    results = {
        name: summarise(dataset, measure(method, dataset, create_evaluation_loader(dataset, 1), device))
        for name, method in methods.items()
    }
    for name, has_target in sets_of(dataset):
        metrics = REFERENCE if has_target else NO_REFERENCE
        rows = [
            [method, *(f"{values[f'{metric}/{name}']:.3f}" for metric in metrics)] for method, values in results.items()
        ]
        print(f"\n{name}", format_table(["", *(metric.upper() for metric in metrics)], rows), sep="\n")
    if config.output is not None:
        folder = Path(config.output)
        folder.mkdir(parents=True, exist_ok=True)
        write_text_atomic(folder / "metrics.json", json.dumps(results, indent=2))
        write_sheets(folder, dataset, methods, device)


def write_sheets(
    folder: Path, dataset: RestorationDataset, methods: dict[str, nn.Module], device: torch.device
) -> None:
    """Write a picture for each set: a column for each photograph; rows: the methods, then the target."""
    for (name, has_target), indices in sets_of(dataset).items():
        columns = []
        for index in indices[:PICTURES_PER_SET]:
            sample = {key: value.to(device) for key, value in dataset.collate([dataset[(0, index)]]).items()}
            rows = [to_pixels(method(sample).picture[0]) for method in methods.values()]
            columns.append(np.concatenate([*rows, *([to_pixels(sample["target"][0])] if has_target else [])]))
        path = folder / f"{name}.jpg"
        write_jpeg(path, np.concatenate(columns, 1))
        print(f"{path}: rows are {', '.join(methods)}{', target' if has_target else ''}")
