"""Opens the photographs that a run trains on and evaluates: labels, caches or windows, and how it augments them."""

import os
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from utils import distributed
from utils.common.config import section_of
from utils.common.errors import UserError
from utils.data.augment import AugmentOptions
from utils.data.augmentation_policy import AugmentationPolicy, resolve_augmentation
from utils.data.cache import open_or_build_check
from utils.data.dataset import DataOptions, SegmentationDataset, open_images, read_photos
from utils.data.dataset_yaml import DatasetSpec
from utils.data.fingerprint import Fingerprint, take_fingerprint
from utils.data.images import read_image
from utils.data.label_shapes import label_lengths_of, shapes_of, sizes_on_disk, small_labels_hint, with_objects
from utils.data.labels import Photo
from utils.data.windows import WindowConfig, open_windows
from utils.predict.lines.label_facts import LabelledPhoto, measure_wire_labels
from utils.run.folder import read_fingerprint
from utils.training.config import TrainConfig
from utils.yolo.inputs import varies_colours_on

VAL_SEED = 0  # of the windows on which trainings validate: those of all runs show the same


@dataclass(frozen=True)
class Data:
    """The class names, the photographs that a run trains on and evaluates, and how it trains on them."""

    names: tuple[str, ...]
    train: SegmentationDataset
    val: SegmentationDataset
    policy: AugmentationPolicy
    root: Path = Path()
    stretch: tuple[float, float] | None = None
    packed: str = ""  # what this machine packed, and where, or why it did not
    cache_folder: Path = Path()
    before: Fingerprint | None = None  # what the run's folder notes; its photographs are not read again

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """What both splits hold, by content.

        At hand on the first rank of each machine. Where nothing could be noted, another rank would read the photographs.
        """
        skipped = [f"{split} {path}" for split in ("train", "val") for path in getattr(self, split).skipped]
        return take_fingerprint(
            self.names, {"train": self.train.photos, "val": self.val.photos}, self.root, skipped, self.before
        )

    @property
    def skipped(self) -> dict[str, str]:
        """What `--skip-bad` left out, by its path in the data set: the line that says why."""
        return {**self.train.skipped, **self.val.skipped}

    def file_facts(self) -> dict[str, Any]:
        """Return what a model file says of its photographs' values, and of a training on windows and its labels."""
        photos, policy = self.train.photos, self.policy
        facts: dict[str, Any] = {"stretch": [*self.stretch]} if self.stretch else {}
        if policy.windows is None or self.train.windowed is None:
            return facts
        facts["windows"] = asdict(policy.windows)
        if thin := policy.augment.wire_classes:  # predictions follow their objects as lines
            size_of = sizes_on_disk(photos)
            found = []
            for photo, size in ((photos[index], size_of(index)) for index in with_objects(photos)):
                outlines = [outline * size for outline in photo.polygons]
                found.append(LabelledPhoto(photo.class_ids, outlines, size, partial(read_image, photo.file)))
            facts |= {"thin_classes": [*thin], **measure_wire_labels(found, thin)}
        lengths = label_lengths_of(photos, self.train.windowed.store.index.sizes)
        return facts | ({"label_lengths": lengths} if lengths else {})


def open_data(
    config: TrainConfig,
    spec: DatasetSpec,
    device: torch.device,
    say: distributed.Say,
    machine: tuple[int, int] = (0, 1),
) -> Data:
    """Open both splits of the data set, and decide how the run trains on them. `say` prints the reasons.

    Builds packed caches or block stores where they are missing. `machine`: the number of this machine and how many machines
    there are; those that share a cache folder share the work, and the others do all of it. Call it on the first rank of each
    machine before the other ranks, which then find everything done. Waits for the machines that share the folder.
    """
    labelled = {split: read_photos(spec, split, say) for split in ("train", "val")}  # wrong labels are said first
    if not any(len(photo.class_ids) for photo in labelled["train"]):
        raise UserError(
            f"{config.data}: no photograph of train has an object, so there is nothing to learn; check its labels"
        )
    options, windows = section_of(config, DataOptions), config.window_config
    train = open_split(options, windows, spec, "train", labelled["train"], config.seed, say)
    if train.windowed:
        say("\n".join(train.windowed.windows.describe(config.epochs)))
    augment = section_of(config, AugmentOptions)
    policy = resolve_augmentation(windows, config.reach, augment, shapes_of(train.photos), spec.names)
    for line in policy.lines:
        say(line)
    train = replace(
        train,
        augment=policy.augment,
        mosaic_epochs=augment.mosaic_epochs(config.epochs),
        colours_on_device=varies_colours_on(device, augment.colour),
    )
    val = open_split(options, windows, spec, "val", labelled["val"], VAL_SEED, say)
    if not windows and (hint := small_labels_hint(train.photos, spec.names, options.img_size)[0]):
        say(hint)
    before = read_fingerprint(Path(config.save_dir))
    data = Data(spec.names, train, val, policy, spec.root, spec.stretch, "", spec.cache_folder, before)
    if distributed.read_rank_environment().local_rank == 0:
        data.fingerprint  # noqa: B018 # taken once per machine
    return data


def open_split(
    options: DataOptions,
    windows: WindowConfig | None,
    spec: DatasetSpec,
    split: str,
    photos: list[Photo],
    seed: int,
    say: distributed.Say,
) -> SegmentationDataset:
    """Open, or build, a split's packed cache or its block store. Its samples are letterboxed."""
    folder, size_px, skips_bad = spec.cache_folder, options.img_size, options.skip_bad
    files = [photo.file for photo in photos]
    packed = windowed = index = None
    if windows:
        windowed = open_windows(photos, size_px, windows, seed, folder, split, say, skips_bad=skips_bad)
        index = windowed.store.index
    elif options.cache != "none":
        packed = open_images(files, size_px, folder, split, say, skips_bad=skips_bad)
        index = packed.index if packed else None
        if options.cache == "packed" and index is None:
            raise UserError(
                f"--cache packed: {folder} has no room for it; make room, or use --cache auto, which does without"
            )
    if skips_bad and index is None:
        index = open_or_build_check(files, folder, split, say)
    unusable = index.unusable if index else {}
    skipped = {os.path.relpath(photos[position].file, spec.root): line for position, line in unusable.items()}
    usable = index.usable(photos) if index else photos
    return SegmentationDataset(usable, size_px, packed=packed, windowed=windowed, seed=seed, skipped=skipped)
