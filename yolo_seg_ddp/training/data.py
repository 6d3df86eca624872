"""Opens the photographs that a run trains on and evaluates: labels, caches or windows, and how it
augments them.
"""

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from yolo_seg_ddp.data.augment import Augmentation, AugmentOptions
from yolo_seg_ddp.data.augmentation_policy import AugmentationPolicy, resolve_augmentation
from yolo_seg_ddp.data.cache import CachePlace, note_digests
from yolo_seg_ddp.data.dataset import SegmentationDataset, read_photos
from yolo_seg_ddp.data.dataset_yaml import DatasetSpec
from yolo_seg_ddp.data.fingerprint import Fingerprint, take_fingerprint
from yolo_seg_ddp.data.label_shapes import (
    LabelStatistics,
    label_lengths_of,
    measure_labels,
    rectangular_classes,
    small_labels_hint,
)
from yolo_seg_ddp.data.labels import Photo
from yolo_seg_ddp.data.options import DataOptions
from yolo_seg_ddp.data.packed_images import PackedImages, open_images, open_or_build_check
from yolo_seg_ddp.data.windows import WindowConfig, open_windows
from yolo_seg_ddp.run.folder import read_fingerprint
from yolo_seg_ddp.training.config import TrainConfig
from yolo_seg_ddp.utils import distributed
from yolo_seg_ddp.utils.errors import UserError
from yolo_seg_ddp.utils.extras import find_extra
from yolo_seg_ddp.utils.options import section_of
from yolo_seg_ddp.utils.text import counted, format_bytes
from yolo_seg_ddp.yolo.inputs import varies_colours_on

VAL_SEED = 0  # of the windows on which trainings validate: those of all runs show the same


@dataclass(frozen=True)
class Data:
    """The data set, the photographs of it that a run trains on and evaluates, and how it trains on
    them.
    """

    spec: DatasetSpec
    train: SegmentationDataset
    val: SegmentationDataset
    policy: AugmentationPolicy
    labels: LabelStatistics  # of train
    packed: str = ""  # what this machine packed, and where, or why it did not

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """What both splits hold, by content.

        At hand on the first rank of each machine. Where nothing could be noted, another rank would
        read the photographs.
        """
        splits = {"train": self.train, "val": self.val}
        photos = {split: dataset.photos for split, dataset in splits.items()}
        skipped = [
            f"{split} {path}" for split, dataset in splits.items() for path in dataset.skipped
        ]
        digests = {
            f"{split} {path}": digest
            for split, dataset in splits.items()
            for path, digest in dataset.digests.items()
        }
        return take_fingerprint(self.spec.names, photos, self.spec.root, skipped, digests=digests)

    @property
    def skipped(self) -> dict[str, str]:
        """What `--skip-bad` left out, by its path in the data set: the line that says why."""
        return {**self.train.skipped, **self.val.skipped}

    def metadata(self) -> dict[str, Any]:
        """Return what a model file says of its photographs' values, and of a training on windows
        and its labels.
        """
        metadata: dict[str, Any] = {"stretch": [*self.spec.stretch]} if self.spec.stretch else {}
        if self.policy.windows is None or self.train.windowed is None:
            return metadata
        metadata["windows"] = asdict(self.policy.windows)

        labels = self.labels
        if labels.thin:
            metadata["thin_classes"] = [*labels.thin]

            # Predictions follow thin objects as lines.
            wires = find_extra("wires")
            metadata |= (
                wires.measure_wire_labels(labels.sample, labels.straight, labels.curved)
                if wires
                else {"wires_bent": [*labels.curved]}
            )

        lengths = label_lengths_of(self.train.photos, self.train.windowed.store.index.sizes)
        return metadata | ({"label_lengths": lengths} if lengths else {})


def open_data(
    config: TrainConfig,
    spec: DatasetSpec,
    device: torch.device,
    say: distributed.Say,
    machine: tuple[int, int] = (0, 1),
    announce: distributed.Say | None = None,
) -> Data:
    """Open both splits of the data set, and decide how the run trains on them. `say` prints the
    reasons.

    `announce` prints what is packed, which each machine does for itself; unset: `say`.

    Builds packed caches or block stores where they are missing. `machine`: the number of this
    machine and how many machines there are; those that share a cache folder share the work, and the
    others do all of it. Call it on the first rank of each machine before the other ranks, which
    then find everything done. Waits for the machines that share the folder.
    """
    # Wrong labels are said first.
    labelled = {split: read_photos(spec, split, say) for split in ("train", "val")}
    if not any(len(photo.class_ids) for photo in labelled["train"]):
        raise UserError(
            f"{config.data}: no photograph of train has an object, so there is nothing to learn; "
            "check its labels"
        )
    windows = config.window_config
    before = read_fingerprint(Path(config.save_dir))
    of_split = partial(
        open_split, config, windows, spec, say=announce or say, machine=machine, before=before
    )
    train = of_split("train", labelled["train"], config.seed)
    if train.windowed:
        say("\n".join(train.windowed.windows.describe(config.epochs)))
    augment = section_of(config, AugmentOptions)
    labels = measure_labels(train.photos)
    policy = resolve_augmentation(windows, config.reach, augment, labels, spec.names)
    for line in policy.lines:
        say(line)
    train = replace(
        train,
        augment=policy.augment,
        mosaic_epochs=augment.mosaic_epochs(config.epochs),
        colours_on_device=varies_colours_on(device, augment.colour),
    )
    val = of_split("val", labelled["val"], VAL_SEED)
    if not windows and (hint := small_labels_hint(labels.sample, spec.names, config.img_size)[0]):
        say(hint)
    photos = {"train": train.photos, "val": val.photos}
    for line in describe_outlines(photos, spec.names, labels, policy.augment):
        say(line)
    if num_shared := len(
        {photo.file for photo in train.photos} & {photo.file for photo in val.photos}
    ):
        shared = (
            f"{counted(num_shared, 'photograph')} of val {'is' if num_shared == 1 else 'are'} in "
            "train, too"
        )
        say(f"{shared}: scores will be too high")
    stores = [split.windowed.store if split.windowed else split.packed for split in (train, val)]
    num_bytes = sum(np.diff(store.index.places[:, 1:]).sum() for store in stores if store)
    packed = f"{format_bytes(num_bytes)} packed in {spec.cache_folder}"
    if not_packed := train.not_packed or val.not_packed:
        packed = f"not packed: {not_packed}"
    data = Data(spec, train, val, policy, labels, packed)
    if distributed.read_rank_environment().local_rank == 0:
        data.fingerprint  # noqa: B018 # taken once per machine
    return data


def describe_outlines(
    photos: Mapping[str, list[Photo]],
    names: tuple[str, ...],
    labels: LabelStatistics,
    augment: Augmentation,
) -> list[str]:
    """Return lines for the console: which classes consist of rectangles, and, if some objects have
    boxes alone, how many have outlines in each split.
    """
    lines = []
    if rectangles := rectangular_classes(labels.sample):
        shown = ", ".join(names[class_id] for class_id in rectangles)
        lines.append(
            f"The outlines of {shown} are upright rectangles and teach such masks; if they are "
            "boxes around other shapes, parse them with --boxes"
        )
    num_objects, num_boxed = (
        {
            split: sum(len(getattr(photo, name)) for photo in of_split)
            for split, of_split in photos.items()
        }
        for name in ("class_ids", "boxed")
    )
    if any(num_boxed.values()):
        outlined = [
            f"{number - num_boxed[split]:,} of {counted(number, 'object')} in {split}"
            for split, number in num_objects.items()
        ]
        lines.append(
            f"Outlines: {', '.join(outlined)}; the others have boxes: their masks are learned from "
            "the box and the colours in it"
        )
        if num_boxed["val"] == num_objects["val"]:
            lines.append("WARNING: no outline in val: mask AP is 0, and boxes choose best.pt")
        if augment.degrees or augment.shear:
            lines.append("WARNING: --degrees, --shear: of turned boxes only the class is learned")
    return lines


def open_split(
    options: DataOptions,
    windows: WindowConfig | None,
    spec: DatasetSpec,
    split: str,
    photos: list[Photo],
    seed: int,
    say: distributed.Say,
    machine: tuple[int, int] = (0, 1),
    before: Fingerprint | None = None,
) -> SegmentationDataset:
    """Open, or build, a split's packed cache or its block store. Its samples are letterboxed.

    `before`: what a run's folder notes of an earlier start. `machine`: as in `open_data`.
    """
    noted = before.photographs.items() if before else ()
    known = {(key.removeprefix(f"{split} "), texts[2]): texts[0] for key, texts in noted}
    place = CachePlace(spec.root, spec.cache_folder, split, say, machine, options.skip_bad, known)
    files = [photo.file for photo in photos]
    size_px = options.img_size
    packed = windowed = index = None
    not_packed = ""
    if windows:
        windowed = open_windows(photos, size_px, windows, seed, place)
        index = windowed.store.index
    elif options.cache == "none":
        not_packed = "--cache none"
    elif isinstance(opened := open_images(files, size_px, place), PackedImages):
        packed, index = opened, opened.index
    elif options.cache == "packed":
        raise UserError(
            f"--cache packed: {opened}; make room, or use --cache auto, which does without"
        )
    else:
        not_packed = opened
        say(f"packed cache off: {not_packed}")
    if options.skip_bad and index is None:
        index = open_or_build_check(files, place)
    unusable = index.unusable if index else {}
    return SegmentationDataset(
        index.usable(photos) if index else photos,
        size_px,
        packed=packed,
        windowed=windowed,
        seed=seed,
        skipped={
            os.path.relpath(files[position], spec.root): line for position, line in unusable.items()
        },
        digests=index.digests if index else note_digests(files, place),
        not_packed=not_packed,
    )
