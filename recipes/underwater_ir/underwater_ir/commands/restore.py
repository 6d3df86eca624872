"""Restore the pictures of a folder, one after the other.

    python restore.py --model experiments/daclip_student_ddp.pt --source dive --output restored

Without --pseudo-root the labels are computed from the pictures' colours, as export_pseudo_labels.py
does. A picture whose longer side exceeds --tile is restored in overlapping tiles.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

from underwater_ir.data.datasets import list_pictures
from underwater_ir.data.pseudo_labels import Label, describe, find_label, label_from, read_label
from underwater_ir.filters import clahe
from underwater_ir.student.network import SIZE_MULTIPLE, Curves, Network, read_student
from underwater_ir.student.restoration import to_pixels
from yolo_seg_ddp.data.images import ImageError, fit_long_side, read_image, write_jpeg
from yolo_seg_ddp.utils.config import parse_config
from yolo_seg_ddp.utils.devices import choose_device
from yolo_seg_ddp.utils.errors import UserError, print_warning
from yolo_seg_ddp.utils.options import FRACTION, Options, option

SMALLEST_TILE_PX = 64


@dataclass(frozen=True)
class RestoreConfig(Options):
    model: str = option(
        "student_model.pt", "weights that training wrote to --save-path", metavar="FILE"
    )
    source: str = option("", "a picture, or a folder of pictures", metavar="PATH", required=True)
    output: str = option("restored", "folder for the restored pictures, JPEG", metavar="DIR")
    pseudo_root: str | None = option(
        None, "folder of labels, with the pictures' paths", metavar="DIR"
    )
    tile: int = option(
        1024, "side of a tile in pixels", at_least=SMALLEST_TILE_PX, multiple_of=SIZE_MULTIPLE
    )
    overlap: int = option(64, "pixels by which tiles overlap", at_least=8)
    max_side: int | None = option(
        None, "shrink longer pictures to this side in pixels", at_least=16
    )
    clahe: float = option(
        0.0, "share of CLAHE's picture in the result; 0.5 gives a hazy one contrast", **FRACTION
    )
    device: str = option("auto", "auto, cpu, cuda or cuda:N")


def main() -> None:
    config = parse_config(RestoreConfig, "Restore the pictures of a folder.")
    if 2 * config.overlap > config.tile:
        raise UserError(
            f"--overlap {config.overlap}: more than half a tile of {config.tile} pixels"
        )
    device = choose_device(config.device, 0)
    student = read_student(Path(config.model)).to(device)
    source = Path(config.source)
    folder, pictures = (
        (source.parent, [Path(source.name)])
        if source.is_file()
        else (source, list_pictures(source))
    )
    num_done = 0
    for picture in pictures:
        try:
            image = read_image(folder / picture)
            label = _label(config, picture, image, student)
        except (ImageError, UserError) as error:
            print_warning(f"{error}: left out")
            continue
        image = fit_long_side(image, config.max_side) if config.max_side else image
        restored = restore(student, image, label, device, config.tile, config.overlap)
        restored = clahe(restored, config.clahe) if config.clahe else restored
        # a.png and a.jpg stay apart
        path = Path(config.output) / picture.parent / (picture.name + ".jpg")
        path.parent.mkdir(parents=True, exist_ok=True)
        write_jpeg(path, restored)
        num_done += 1
        print(f"{path} ({image.shape[1]} x {image.shape[0]})", flush=True)
    if not num_done:
        raise UserError(
            f"--source {source}: no readable picture; expected .png, .jpg, .tif or .bmp"
        )
    print(f"{num_done} of {len(pictures)} pictures restored")


def _label(config: RestoreConfig, picture: Path, image: np.ndarray, student: Network) -> Label:
    if config.pseudo_root is None:
        label = label_from(describe(image))
    else:
        file = find_label(Path(config.pseudo_root), picture)
        if file is None:
            raise UserError(f"{picture}: no pseudo-label below {config.pseudo_root}")
        label = read_label(file)
    if label.shape[:2] != student.label_shape[:2]:
        raise UserError(
            f"{picture}: a label of {label.shape[0]} masks and {label.shape[1]} numbers, but the "
            "network was trained with "
            f"{student.label_shape[0]} and {student.label_shape[1]}; give its labels with "
            "--pseudo-root"
        )
    return label


@torch.inference_mode()
def restore(
    student: Network,
    image: np.ndarray,
    label: Label,
    device: torch.device,
    tile_px: int,
    overlap_px: int,
) -> np.ndarray:
    """Restore a picture, RGB uint8 (H, W, 3), at its own size; tiles are blended linearly where
    they overlap.
    """
    height, width = image.shape[:2]
    if isinstance(student, Curves):
        # one curve for the whole picture
        tile_px = max(height, width)
    masks = functional.interpolate(
        label.masks[None], (height, width), mode="bilinear", antialias=False
    )
    total, weight = torch.zeros(3, height, width), torch.zeros(1, height, width)
    for top, bottom in spans(height, tile_px, overlap_px):
        for left, right in spans(width, tile_px, overlap_px):
            part = (
                torch.from_numpy(np.ascontiguousarray(image[top:bottom, left:right])).permute(
                    2, 0, 1
                )[None]
                / 255
            )
            tile = _pass(student, part, masks[..., top:bottom, left:right], label.z_d[None], device)
            share = _ramp(bottom - top, overlap_px)[:, None] * _ramp(right - left, overlap_px)
            total[:, top:bottom, left:right] += tile * share
            weight[:, top:bottom, left:right] += share
    return to_pixels(total / weight)


def spans(length: int, tile_px: int, overlap_px: int) -> list[tuple[int, int]]:
    """Return (start, end) of equally spaced tiles that cover `length` and overlap by at least
    `overlap_px`.
    """
    if length <= tile_px:
        return [(0, length)]
    count = -(-(length - overlap_px) // (tile_px - overlap_px))
    starts = np.linspace(0, length - tile_px, count).round().astype(int)
    return [(int(start), int(start) + tile_px) for start in starts]


def _pass(
    student: Network,
    picture: torch.Tensor,
    masks: torch.Tensor,
    z_d: torch.Tensor,
    device: torch.device,
) -> torch.Tensor:
    """Restore (1, 3, H, W), mirrored at its right and lower edge to sides that the network takes;
    return (3, H, W).
    """
    height, width = picture.shape[2:]
    padding = (0, -width % SIZE_MULTIPLE, 0, -height % SIZE_MULTIPLE)
    mode = "reflect" if min(height, width) > SIZE_MULTIPLE else "replicate"
    inputs = {
        name: functional.pad(part, padding, mode).to(device)
        for name, part in (("picture", picture), ("masks", masks))
    }
    restored: torch.Tensor = student({**inputs, "z_d": z_d.to(device)}).picture[
        0, :, :height, :width
    ]
    return restored.cpu()


def _ramp(length: int, overlap_px: int) -> torch.Tensor:
    """Return the weight (length,) of a tile's pixels along one side: above 0, rising from both ends
    to 1.
    """
    distance = torch.arange(1, length + 1).minimum(torch.arange(length, 0, -1))
    return (distance / overlap_px).clamp(max=1)
