"""Converts a model with Ultralytics' exporter: offline, quiet, with this project's metadata and
calibration images.
"""

import contextlib
import fcntl
import io
import logging
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from yolo_seg_ddp.data.images import letterbox, read_image
from yolo_seg_ddp.extras.exports.exported import METADATA_KEY, ExportMetadata, import_runtime
from yolo_seg_ddp.extras.exports.options import PACKAGES
from yolo_seg_ddp.predict.tiles import Tiling
from yolo_seg_ddp.utils.environment import prepare_environment
from yolo_seg_ddp.utils.errors import UsageError, UserError, one_line
from yolo_seg_ddp.yolo.model import YoloModel

QUANTIZE = {"fp32": None, "fp16": 16, "int8": 8}  # Ultralytics' names
SCRATCH, LOCK_FILE, OLD = ".export-", "in-use.lock", ".old"


@dataclass(frozen=True)
class Variant:
    """One export to make: a format in a precision."""

    kind: str
    precision: str


def check_variants(variants: Sequence[Variant], device: torch.device) -> None:
    """Raise UsageError or UserError, before any work, for an export that
    this machine cannot make.
    """
    if not variants:
        raise UsageError("--no-fp32: add --half or --int8")
    for kind, precision in ((one.kind, one.precision) for one in variants):
        if kind == "torchscript" and precision == "int8":
            raise UsageError("--int8: TorchScript has no INT8; export it in a run without --int8")
        if kind == "torchscript" and precision == "fp16" and device.type != "cuda":
            raise UsageError(
                "--half: TorchScript in fp16 needs an NVIDIA GPU; export it in a run without --half"
            )
        if kind == "engine" and device.type != "cuda":
            raise UserError(
                "--format engine: TensorRT needs an NVIDIA GPU; here use onnx or openvino"
            )
        nncf = ("nncf",) if kind == "openvino" and precision == "int8" else ()
        for package in (*PACKAGES[kind], *nncf):
            import_runtime(package)


class CalibrationImages:
    """The inputs for measuring INT8 ranges, one by one: dictionaries with `img`, uint8 (1, 3, S,
    S).

    Photographs of the training split, letterboxed as in training. With a tiling, each is followed
    by one of its tiles.
    """

    batch_size = 1

    def __init__(self, files: Sequence[Path], size_px: int, tiling: Tiling | None) -> None:
        self.files = files
        self.size_px = size_px
        self.tiling = tiling

    def __len__(self) -> int:
        return len(self.files) * (2 if self.tiling else 1)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for number, file in enumerate(self.files):
            photo = read_image(file, None if self.tiling else self.size_px)
            yield self._input(photo)
            if self.tiling:
                tiles = [tile for level in self.tiling.tiles_of(photo) for tile in level]
                tiles = tiles or [(0, 0, photo.shape[1], photo.shape[0])]
                left, top, right, bottom = tiles[np.random.default_rng(number).integers(len(tiles))]
                yield self._input(photo[top:bottom, left:right])

    def _input(self, photo: np.ndarray) -> dict[str, torch.Tensor]:
        canvas, _, _ = letterbox(photo, self.size_px)
        return {"img": torch.from_numpy(canvas).permute(2, 0, 1)[None].contiguous()}


def convert(
    model: YoloModel,
    variant: Variant,
    metadata: ExportMetadata,
    folder: Path,
    stem: str,
    calibration: CalibrationImages | None = None,
    device: torch.device | None = None,
) -> Path:
    """Write an export of a model of `load_weights` into an empty folder; return its file or folder.

    Raises UserError with the converter's reason.
    """
    on_gpu = variant.kind == "engine" or (variant.kind, variant.precision) == (
        "torchscript",
        "fp16",
    )
    overrides = {
        "format": variant.kind,
        "imgsz": metadata.size_px,
        "batch": metadata.batch_size,
        "dynamic": metadata.is_dynamic,
        "quantize": QUANTIZE[variant.precision],
        # a name for the metadata; the images are ours
        "data": "calibration" if calibration else None,
        "device": str(device.index or 0) if on_gpu and device else "cpu",
    }
    # YOLO26: the one-to-many outputs, which are decoded and suppressed like those of other
    # families.
    model.end2end = False
    # Ultralytics writes beside this file, which need not exist
    model.pt_path = str(folder / f"{stem}.pt")
    try:
        with _quiet():
            made = _exporter(overrides, metadata, calibration)(model=model)
    # Each converter has its own kinds of errors.
    except Exception as error:
        raise UserError(
            f"--format {variant.kind} ({variant.precision}): {one_line(error, 300)}"
        ) from error
    stem += "" if variant.precision == "fp32" else f"_{variant.precision}"
    # Ultralytics also recognises the format by its end.
    path = folder / (
        f"{stem}_openvino_model" if variant.kind == "openvino" else f"{stem}.{variant.kind}"
    )
    os.replace(Path(made), path)
    return path


def _exporter(
    overrides: dict[str, Any], metadata: ExportMetadata, calibration: CalibrationImages | None
) -> Any:
    prepare_environment()
    from ultralytics.engine.exporter import Exporter

    class OfflineExporter(Exporter):
        """Calibrates on this project's images instead of Ultralytics' resize of the validation
        split.
        """

        def get_int8_calibration_dataloader(self, prefix: str = "") -> CalibrationImages | None:
            return calibration

    exporter = OfflineExporter(overrides=overrides)
    # Without Ultralytics' statistics.
    mine = {METADATA_KEY: metadata.to_json()}
    exporter.callbacks = {"on_export_start": [lambda exporter: exporter.metadata.update(mine)]}
    return exporter


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the converters' progress bars, log lines and warnings off the terminal."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


@contextlib.contextmanager
def scratch_folder(output: Path) -> Iterator[Path]:
    """Yield a folder in `output` for exports that are not proven yet, and remove it at the end.

    First the folders of killed processes are removed: the system has released their locks. A folder
    without a lock file stays, because it may be the user's.
    """
    for file in output.glob(f"{SCRATCH}*/{LOCK_FILE}"):
        _remove_if_left(file, output)
    with (
        tempfile.TemporaryDirectory(prefix=SCRATCH, dir=output) as folder,
        (Path(folder) / "lock").open("w") as lock,
    ):
        # a file system without locks: other processes leave the folder alone
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
            os.rename(lock.name, Path(folder) / LOCK_FILE)
        yield Path(folder)


def _remove_if_left(file: Path, output: Path) -> None:
    folder = file.parent
    if folder.is_symlink() or file.is_symlink() or not file.is_file():
        return
    # locked by its process, or another user's
    with contextlib.suppress(OSError), file.open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # A process was killed in the middle of `publish`.
        for old in folder.glob(f"*/*{OLD}"):
            target = output / old.name.removesuffix(OLD)
            if not target.exists():
                os.replace(old, target)
        shutil.rmtree(folder)
        print(f"Removed {folder}, which an export that was killed left", flush=True)


def publish(made: Path, target: Path) -> None:
    """Move a proven export to its place; one of that name is replaced. A folder is moved whole."""
    if not made.is_dir() or not target.exists():
        os.replace(made, target)
        return
    # A folder cannot be renamed over another.
    old = made.with_name(f"{target.name}{OLD}")
    os.replace(target, old)
    os.replace(made, target)
    shutil.rmtree(old)
