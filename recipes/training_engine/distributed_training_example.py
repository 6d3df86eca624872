"""Train a residual network on CIFAR-10, the digits of scikit-learn or your pictures, on one GPU,
many GPUs or the CPU.

    python distributed_training_example.py --epochs 200 --batch-size 128 --lr 0.1
    python distributed_training_example.py --distributed --use-amp --use-ema --epochs 200

The same command again continues an interrupted run. `--help` lists every option with its default.
"""

import contextlib
import io
import socket
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import training_engine  # makes the project's modules importable
from launching import plan_ranks
from torch import nn
from torch.utils.data import Dataset

from yolo_seg_ddp.data.images import ImageError, read_image, resize_area
from yolo_seg_ddp.run.folder import OwnedRun, resume_arguments
from yolo_seg_ddp.utils.config import parse_config
from yolo_seg_ddp.utils.errors import (
    EXIT_DONE,
    EXIT_STOPPED_BY_SIGNAL,
    UserError,
    one_line,
    print_warning,
    run_script,
)
from yolo_seg_ddp.utils.options import Options, option

CPU_PROCESSES = 2
DOWNLOAD_TIMEOUT_S = 20.0
SIDE_PX = 32  # of CIFAR-10's pictures, and of a folder's
DIGIT_SIDE_PX = 16  # a quarter of the work at 32
# of the side, before random crops: 4 of 32 pixels, as in He et al. 2015 (arXiv 1512.03385)
PAD_SHARE = 1 / 8


@dataclass(frozen=True)
class ExampleConfig(Options):
    """The guide's flags, then those that the guide does not have."""

    epochs: int = option(200, "passes over the training pictures", at_least=1, may_differ=True)
    batch_size: int = option(128, "pictures per GPU (per process) and step", at_least=1)
    lr: float = option(0.1, "learning rate; with N GPUs a rate N times as high is common", above=0)
    patience: int = option(
        0, "stop after this many epochs without a better validation accuracy; 0: never", at_least=0
    )
    data_dir: str = option(
        "./data", "folder of the data", metavar="DIR", may_differ=True, needs="not dataset=digits"
    )
    num_workers: int = option(
        4, "most loader processes per GPU; fewer where cores are few", at_least=0
    )
    use_amp: bool = option(False, "mixed precision: bf16 where supported, else fp16 on GPUs")
    use_ema: bool = option(False, "validate a moving average of the weights")
    distributed: bool = option(False, "train on several GPUs, or in 2 CPU processes")
    world_size: int | None = option(
        None,
        "processes with --distributed; unset: one per GPU, else 2",
        at_least=1,
        needs="distributed or world_size=1",
    )
    backend: str = option(
        "nccl",
        "how processes communicate; without a GPU always gloo",
        choices=("nccl", "gloo"),
        needs="distributed",
    )
    experiment_name: str = option(
        "cifar10_training", "folder in --save-dir", metavar="NAME", may_differ=True
    )
    save_dir: str = option(
        "./experiments", "folder of all experiments", metavar="DIR", may_differ=True
    )
    dataset: str = option(
        "auto",
        "auto: cifar10, but digits when it cannot be had; folder: pictures in train/CLASS and "
        "val/CLASS of --data-dir",
        choices=("auto", "cifar10", "digits", "folder"),
    )
    seed: int = option(0, "seed of weights, order and augmentation", at_least=0)
    config: str | None = option(
        None, "YAML file with any of these options", metavar="FILE", may_differ=True
    )
    resume: str | None = option(
        None, "continue this run's folder with its own options", metavar="RUN", may_differ=True
    )


def main() -> int:
    """Train; return the exit code."""
    config = parse_config(
        ExampleConfig, "Train on CIFAR-10 with TrainingEngine", resume_arguments(sys.argv[1:])
    )
    wanted = (
        (config.world_size or torch.cuda.device_count() or CPU_PROCESSES)
        if config.distributed
        else 1
    )
    world_size, backend = plan_ranks(wanted, config.backend)
    config = replace(config, world_size=world_size, backend=backend)
    dataset, train_set, val_set = load_datasets(config.dataset, Path(config.data_dir))
    config = replace(config, dataset=dataset)
    print(
        "Configuration:",
        *(f"  {name}: {value}" for name, value in asdict(config).items()),
        sep="\n",
        flush=True,
    )
    folder = Path(config.save_dir) / config.experiment_name
    with OwnedRun(replace(config, save_dir=str(folder), experiment_name="")) as run:
        print(
            "\n".join(
                [*run.notes, f"Training on {len(train_set)} pictures, validating on {len(val_set)}"]
            ),
            flush=True,
        )
        try:
            training_engine.launch_distributed_training(
                training_engine.distributed_train_worker,
                world_size,
                backend,
                **training_configuration(config, train_set, val_set, run.resumes),
            )
        except SystemExit as stop:
            if stop.code != EXIT_STOPPED_BY_SIGNAL:
                raise
            return run.conclude("a signal")
        run.conclude("")
    return EXIT_DONE


def training_configuration(
    config: ExampleConfig, train_set: "Pictures", val_set: "Pictures", resume: bool
) -> dict[str, Any]:
    """Return the configuration of Method 2 in the guide."""
    handed_on = ("use_amp", "use_ema", "save_dir", "experiment_name", "seed")
    num_classes = int(train_set.labels.max()) + 1
    # 60, 120 and 160 of 200 epochs
    milestones = [round(config.epochs * share) for share in (0.3, 0.6, 0.8)]
    return {
        "model_fn": lambda: ResidualNetwork(num_classes),
        "train_dataset": train_set,
        "val_dataset": val_set,
        "batch_size": config.batch_size,
        "num_workers": config.num_workers,
        "optimizer_fn": lambda weights: torch.optim.SGD(
            weights, lr=config.lr, momentum=0.9, weight_decay=1e-4
        ),
        "criterion_fn": lambda: nn.CrossEntropyLoss(),
        "scheduler_fn": lambda optimizer: torch.optim.lr_scheduler.MultiStepLR(
            optimizer, milestones, gamma=0.2
        ),
        "engine_kwargs": {name: getattr(config, name) for name in handed_on},
        "train_kwargs": {
            "num_epochs": config.epochs,
            "early_stopping_patience": config.patience,
            "resume": resume,
        },
    }


# --- network --------------------------------------------------------------------------------------


class Block(nn.Module):
    """Two 3x3 convolutions beside a shortcut, as in He et al. 2015 (arXiv 1512.03385), with
    projections (option B).
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        projection = [nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)]
        self.shortcut = nn.Sequential(*(projection if stride > 1 or inputs != outputs else []))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Map (B, inputs, H, W) to (B, outputs, H / stride, W / stride)."""
        return torch.relu(self.body(features) + self.shortcut(features))


class ResidualNetwork(nn.Module):
    """ResNet-20 for 32 x 32 pictures (He et al. 2015, section 4.2): 0.27 million weights."""

    def __init__(self, num_classes: int, width: int = 16, blocks: int = 3) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
        )
        layers: list[nn.Module] = []
        channels = width
        for stage in range(3):
            for number in range(blocks):
                layers.append(Block(channels, width << stage, 2 if stage and not number else 1))
                channels = width << stage
        self.stages = nn.Sequential(*layers)
        self.classifier = nn.Linear(channels, num_classes)

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        """Map (B, 3, H, W) to class scores (B, classes)."""
        return self.classifier(self.stages(self.stem(pictures)).mean((2, 3)))  # type: ignore[no-any-return]


# --- data -----------------------------------------------------------------------------------------


class Pictures(Dataset[Any]):
    """Pictures uint8 (N, H, W, 3) with labels (N,); for training cropped and, if a mirror image is
    of its class, flipped.

    Random numbers come from PyTorch's generator, which the engine seeds for each batch.
    """

    def __init__(
        self, pictures: np.ndarray, labels: np.ndarray, *, augment: bool, flip: bool
    ) -> None:
        self.pictures = (
            torch.from_numpy(np.ascontiguousarray(pictures)).permute(0, 3, 1, 2).contiguous()
        )
        self.labels = torch.from_numpy(np.asarray(labels, np.int64))
        self.augment = augment
        self.flip = flip
        # Of CIFAR-10's training pictures, as fractions of 255.
        self.mean = torch.tensor([0.4914, 0.4822, 0.4465])[:, None, None]
        self.std = torch.tensor([0.2023, 0.1994, 0.2010])[:, None, None]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        picture = (self.pictures[index] / 255 - self.mean) / self.std  # (3, H, W)
        if self.augment:
            _, height, width = picture.shape
            pad = round(height * PAD_SHARE)
            top, left = torch.randint(2 * pad + 1, (2,)).tolist()
            mirrored = self.flip and torch.rand(()) < 0.5
            padded = nn.functional.pad(picture, (pad,) * 4)
            picture = padded[:, top : top + height, left : left + width]
            picture = picture.flip(2) if mirrored else picture
        return picture, self.labels[index]


def load_datasets(name: str, folder: Path) -> tuple[str, Pictures, Pictures]:
    """Return the name of the data set, its training and its validation pictures.

    `auto` is CIFAR-10, but the digits when it is not in `folder` and cannot be downloaded.
    """
    if name in ("auto", "cifar10"):
        try:
            return "cifar10", *load_cifar10(folder)
        except UserError as error:
            if name == "cifar10":
                raise
            print_warning(f"{error}; training on scikit-learn's digits instead")
    return ("folder", *load_folder(folder)) if name == "folder" else ("digits", *load_digits())


def load_cifar10(folder: Path) -> tuple[Pictures, Pictures]:
    """Return CIFAR-10's 50,000 training and 10,000 test pictures, 32 x 32; download them (170 MB)
    if necessary.

    Raises UserError when they can be neither found nor downloaded.
    """
    from torchvision.datasets import CIFAR10

    before_s = socket.getdefaulttimeout()
    socket.setdefaulttimeout(DOWNLOAD_TIMEOUT_S)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            parts = [CIFAR10(folder, train=train, download=True) for train in (True, False)]
    except (OSError, RuntimeError) as error:
        raise UserError(
            f"CIFAR-10 is not in {folder} and cannot be downloaded ({one_line(error)}); put "
            "cifar-10-python.tar.gz there, or use --dataset digits"
        ) from error
    finally:
        socket.setdefaulttimeout(before_s)
    train, val = (
        Pictures(part.data, np.array(part.targets), augment=part.train, flip=True) for part in parts
    )
    return train, val


def load_folder(folder: Path) -> tuple[Pictures, Pictures]:
    """Return the pictures of `train`/CLASS and of `val`/CLASS, else `validation` or `test`,
    squeezed to 32 x 32.
    """
    from torchvision.datasets import ImageFolder

    val = next((part for part in ("val", "validation") if (folder / part).is_dir()), "test")
    try:
        listed = [ImageFolder(folder / part) for part in ("train", val)]
        read = [
            np.stack(
                [
                    resize_area(read_image(Path(file), 4 * SIDE_PX), SIDE_PX, SIDE_PX)
                    for file, _ in part.samples
                ]
            )
            for part in listed
        ]
    except (OSError, ImageError) as error:
        raise UserError(
            f"{folder}: needs pictures in train/CLASS and val/CLASS ({one_line(error)})"
        ) from error
    if listed[0].classes != listed[1].classes:
        raise UserError(
            f"{folder}: train has the classes {listed[0].classes}, but {val} {listed[1].classes}"
        )
    train, test = (
        Pictures(read[at], listed[at].targets, augment=at == 0, flip=True) for at in (0, 1)
    )
    return train, test


def load_digits() -> tuple[Pictures, Pictures]:
    """Return 1,437 training and 360 validation pictures of handwritten digits, enlarged from 8 x 8
    to 16 x 16.

    They are the test part of the UCI set "Optical Recognition of Handwritten Digits", which
    scikit-learn contains.
    """
    try:
        from sklearn import datasets
    except ImportError as error:
        raise UserError(
            "scikit-learn is missing: pip install -r requirements.txt in this folder"
        ) from error
    digits = datasets.load_digits()
    grey = torch.from_numpy(digits.images * (255 / 16)).float()[:, None]  # (N, 1, 8, 8), 0 to 255
    enlarged = nn.functional.interpolate(grey, size=DIGIT_SIDE_PX, mode="bilinear").round().byte()
    pictures = enlarged.expand(-1, 3, -1, -1).permute(0, 2, 3, 1).numpy()
    order = np.random.default_rng(0).permutation(len(pictures))
    parts = ((order[360:], True), (order[:360], False))
    train, val = (
        Pictures(pictures[at], digits.target[at], augment=augment, flip=False)
        for at, augment in parts
    )
    return train, val


if __name__ == "__main__":
    run_script(main)
