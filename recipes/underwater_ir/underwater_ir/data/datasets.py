"""Pairs of pictures with their pseudo-labels, and the loaders of one rank.

Train: `<root>/input/**` and `<root>/target/**`, paired by equal relative paths. Benchmarks:
`<root>/<set>/{input,target}`, without targets also `<root>/<set>/*`. A benchmark set is named by
its folder.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import BatchSampler, DistributedSampler, default_collate

from underwater_ir.data.pseudo_labels import find_label, read_label
from yolo_seg_ddp.data.images import ImageError, read_image
from yolo_seg_ddp.data.loader import EpochBatches, EpochLoader, Key, ShardBatches, get_dataloader
from yolo_seg_ddp.utils.distributed import rank, world_size
from yolo_seg_ddp.utils.errors import UserError
from yolo_seg_ddp.utils.files import walk

SUFFIXES = (".png", ".jpg", ".jpeg", ".tif", ".tiff", ".bmp")
SMALLEST_CROP = 0.7  # of the picture's side, in training
HELD_OUT = "held-out"  # the set of the training pairs that a fold leaves out
LABEL_CURE = "write the labels with python export_pseudo_labels.py"


@dataclass(frozen=True)
class Entry:
    """One picture: its files, and the benchmark set that it belongs to ("" in training)."""

    picture: Path
    target: Path | None
    label: Path
    set_name: str = ""


def list_pictures(folder: Path) -> list[Path]:
    """Return the pictures below a folder, sorted, as paths relative to it; links to folders are not
    followed.
    """
    if not folder.is_dir():
        return []
    return sorted(
        (place / entry.name).relative_to(folder)
        for place, entries in walk(folder, lambda subfolder: not subfolder.is_symlink())
        for entry in entries
        if entry.name.lower().endswith(SUFFIXES) and entry.is_file()
    )


def train_entries(root: Path, label_root: Path) -> list[Entry]:
    """Return the training pairs.

    Raises UserError when there is none, or when labels are missing.
    """
    targets = set(list_pictures(root / "target"))
    pictures = [path for path in list_pictures(root / "input") if path in targets]
    if not pictures:
        raise UserError(
            f"--train-root {root}: no picture has the same path below {root / 'input'} and "
            f"{root / 'target'}; "
            f"python make_data.py makes a data set"
        )
    return _with_labels(
        [(root / "input", path, root / "target" / path, "") for path in pictures], label_root
    )


def benchmark_entries(root: Path, label_root: Path, has_targets: bool) -> list[Entry]:
    """Return the pictures of all sets below a benchmark root, set by set; empty if the root does
    not exist.
    """
    found: list[Entry] = []
    folders = sorted(path for path in root.iterdir() if path.is_dir()) if root.is_dir() else []
    for folder in folders:
        source = folder / "input" if has_targets or (folder / "input").is_dir() else folder
        pictures = list_pictures(source)
        if has_targets:
            targets = set(list_pictures(folder / "target"))
            pictures = [path for path in pictures if path in targets]
        places = [
            (source, path, folder / "target" / path if has_targets else None, folder.name)
            for path in pictures
        ]
        found += _with_labels(places, label_root / folder.name) if places else []
    return found


def shares_by_scene(entries: Sequence[Entry], source: Path, count: int) -> list[list[Entry]]:
    """Return the pairs below `source` in `count` shares of about equal size, as the set HELD_OUT.

    Pictures in one subfolder are one scene and stay together; each other picture is its own.
    """
    scenes: dict[Path, list[Entry]] = {}
    for entry in entries:
        folder = entry.picture.parent
        scene = entry.picture if folder == source else folder
        scenes.setdefault(scene, []).append(replace(entry, set_name=HELD_OUT))
    if len(scenes) < count:
        raise UserError(
            f"{source}: {len(scenes)} scenes cannot make {count} folds; a scene is a subfolder, "
            "or a picture outside of one"
        )
    shares: list[list[Entry]] = [[] for _ in range(count)]
    for pairs in sorted(scenes.values(), key=len, reverse=True):
        min(shares, key=len).extend(pairs)
    return shares


def _with_labels(
    places: Sequence[tuple[Path, Path, Path | None, str]], label_root: Path
) -> list[Entry]:
    labels = [find_label(label_root, picture) for _, picture, _, _ in places]
    missing = [
        place[0] / place[1] for place, label in zip(places, labels, strict=True) if label is None
    ]
    if missing:
        raise UserError(
            f"{len(missing)} of {len(places)} pictures have no pseudo-label below {label_root}, "
            f"the first is {missing[0]}; {LABEL_CURE}"
        )
    return [
        Entry(source / picture, target, label, name)
        for (source, picture, target, name), label in zip(places, labels, strict=True)
        if label is not None
    ]


class RestorationDataset:
    """Pictures, targets and labels of one size, as float32 tensors. A key is (epoch, index).

    With `augment` a sample is cropped, flipped and turned by quarters: a function of (seed, epoch,
    index). `label_shape` is what each label must have (`Label.shape`).
    """

    collate: Callable[[list[Any]], Any] = staticmethod(default_collate)

    def __init__(
        self,
        entries: Sequence[Entry],
        img_size: int,
        label_shape: tuple[int, int, int, int],
        *,
        augment: bool = False,
        seed: int = 0,
    ) -> None:
        self.entries = list(entries)
        self.img_size = img_size
        self.label_shape = label_shape
        self.augment = augment
        self.seed = seed

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, key: Key) -> dict[str, torch.Tensor]:
        epoch, index = key
        entry = self.entries[index]
        label = read_label(entry.label)
        if label.shape != self.label_shape:
            raise UserError(
                f"{entry.label}: masks, z_d, global_prob and text_embeddings of {label.shape}, "
                "but the network has "
                f"{self.label_shape}; {LABEL_CURE}"
            )
        picture = _read(entry.picture)
        target = picture if entry.target is None else _read(entry.target)
        window, turns, mirrored = self._placement(epoch, index)
        arrays = {
            "picture": _resized(picture, self.img_size, window),
            "target": _resized(target, self.img_size, window),
            "masks": torch.stack(
                [_resized_mask(mask, self.img_size, window) for mask in label.masks]
            ).clamp(0, 1),
        }
        sample = {name: _turned(array, turns, mirrored) for name, array in arrays.items()}
        sample |= {
            "z_d": label.z_d,
            "global_prob": label.global_prob,
            "confidence_scale": label.confidence_scale,
        }
        if label.text_embeddings is not None:
            sample["text_embeddings"] = label.text_embeddings
        return {**sample, "index": torch.tensor(index)}

    def _placement(self, epoch: int, index: int) -> tuple[tuple[float, float, float], int, bool]:
        """Return the crop (left, top, side; shares of the picture), the quarter turns, and whether
        to mirror.
        """
        if not self.augment:
            return (0.0, 0.0, 1.0), 0, False
        rng = np.random.default_rng((self.seed, epoch, index))
        side = rng.uniform(SMALLEST_CROP, 1)
        left, top = rng.uniform(0, 1 - side, 2)
        return (float(left), float(top), float(side)), int(rng.integers(4)), bool(rng.integers(2))


def _read(path: Path) -> np.ndarray:
    try:
        return read_image(path)
    except ImageError as error:
        raise UserError(f"{error}; repair or remove it") from error


def _box(
    width: int, height: int, window: tuple[float, float, float]
) -> tuple[float, float, float, float]:
    left, top, side = window
    return left * width, top * height, (left + side) * width, (top + side) * height


def _resized(image: np.ndarray, size_px: int, window: tuple[float, float, float]) -> torch.Tensor:
    """Return a window of RGB uint8 (H, W, 3) as float32 (3, size, size) in [0, 1]: bilinear, as the
    upstream data.
    """
    box = _box(image.shape[1], image.shape[0], window)
    small = Image.fromarray(image).resize((size_px, size_px), Image.Resampling.BILINEAR, box)
    return torch.from_numpy(np.asarray(small, np.float32) / 255).permute(2, 0, 1).contiguous()


def _resized_mask(
    mask: torch.Tensor, size_px: int, window: tuple[float, float, float]
) -> torch.Tensor:
    box = _box(mask.shape[1], mask.shape[0], window)
    picture = Image.fromarray(mask.numpy(), "F")
    return torch.from_numpy(
        np.array(picture.resize((size_px, size_px), Image.Resampling.BILINEAR, box))
    )


def _turned(array: torch.Tensor, turns: int, mirrored: bool) -> torch.Tensor:
    array = torch.rot90(array, turns, (1, 2))
    return (array.flip(2) if mirrored else array).contiguous()


class SamplerBatches(EpochBatches):
    """The batches of a share that PyTorch's DistributedSampler chooses; its epoch is theirs."""

    epoch: Any = property(
        lambda self: self.batches.sampler.epoch,
        lambda self, epoch: self.batches.sampler.set_epoch(epoch),
    )

    def __init__(self, sampler: DistributedSampler[Any], batch_size: int) -> None:
        self.batches, self.start_batch = BatchSampler(sampler, batch_size, drop_last=False), 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[Key]]:
        for batch in islice(self.batches, self.start_batch, None):
            yield [(self.epoch, index) for index in batch]


def create_paired_train_loader(
    dataset: RestorationDataset,
    batch_size: int,
    num_workers: int = 0,
    sampler: EpochBatches | DistributedSampler[Any] | None = None,
    pin_memory: bool = False,
) -> EpochLoader:
    """Return the training loader of one rank.

    `sampler` gives this rank's batches of each epoch; without it one rank trains on all. With
    EpochBatches every picture is used once an epoch, and every rank has the same number of batches;
    PyTorch's DistributedSampler repeats some for that.
    """
    sampler = sampler or EpochBatches(len(dataset), batch_size, 0, 1, dataset.seed)
    if isinstance(sampler, DistributedSampler):
        sampler = SamplerBatches(sampler, batch_size)
    return get_dataloader(dataset, sampler, num_workers, pin_memory)


def create_evaluation_loader(
    dataset: RestorationDataset, batch_size: int, num_workers: int = 0, pin_memory: bool = False
) -> EpochLoader:
    """Return the evaluation loader of this rank's share, in which no picture is repeated."""
    shares = ShardBatches(len(dataset), batch_size, rank(), world_size())
    return get_dataloader(dataset, shares, num_workers, pin_memory)
