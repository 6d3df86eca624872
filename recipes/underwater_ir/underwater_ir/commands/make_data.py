"""Make the default data set: real photographs, put under water, with their pseudo-labels.

python make_data.py                       # from pictures of scikit-image, scikit-learn
python make_data.py --images ~/photographs --num-train 2000 --size 256
"""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import util
from pathlib import Path

import cv2
import numpy as np

from underwater_ir.commands.export_pseudo_labels import write_label
from underwater_ir.data.datasets import list_pictures
from underwater_ir.data.pseudo_labels import COLOURS
from underwater_ir.data.water import draw_range_m, draw_water, reach_m, submerge
from yolo_seg_ddp.data.images import ImageError, read_image, resize_area
from yolo_seg_ddp.utils.config import parse_config
from yolo_seg_ddp.utils.errors import UserError, print_warning
from yolo_seg_ddp.utils.files import write_bytes_atomic
from yolo_seg_ddp.utils.options import Options, option
from yolo_seg_ddp.utils.text import counted

# Colour photographs in the packages: folder within the package, then file names.
PACKAGED = (
    (
        "skimage",
        "data",
        ("astronaut.png", "chelsea.png", "coffee.png", "motorcycle_left.png", "rocket.jpg"),
    ),
    ("sklearn", "datasets/images", ("china.jpg", "flower.jpg")),
)
HELD_OUT_SHARE = 0.25  # of the photographs, for the test sets alone
SMALLEST_CROP = 0.5  # of the photograph's shorter side
SET_NAME, UNPAIRED_NAME = "simulated", "simulated-unpaired"


@dataclass(frozen=True)
class DataConfig(Options):
    images: str | None = option(
        None, "folder of photographs; unset: those of scikit-image and scikit-learn", metavar="DIR"
    )
    output: str = option(".", "folder in which Dataset and pseudo-labels are made", metavar="DIR")
    num_train: int = option(320, "training pairs", at_least=1)
    num_test: int = option(48, "pictures of each test set", at_least=1)
    size: int = option(160, "side of the pictures in pixels", at_least=16)
    seed: int = option(0, "seed of crops and waters", at_least=0)


def main() -> None:
    config = parse_config(DataConfig, "Put photographs under water and write their pseudo-labels.")
    output = Path(config.output)
    data, labels = output / "Dataset", output / "pseudo-labels" / "daclip"
    if data.exists():
        raise UserError(f"{data} exists; remove it, or choose another --output")
    photographs = find_photographs(config.images)
    train, held_out = split(photographs, config.seed)
    print(
        f"{len(photographs)} photographs: {len(train)} for training, {len(held_out)} for the test "
        "sets"
    )
    paired, unpaired = data / "testset(ref)" / SET_NAME, data / "testset(non-ref)" / UNPAIRED_NAME
    parts = (
        (data / "train", labels / "train", train, config.num_train),
        (paired, labels / "testset_ref" / SET_NAME, held_out, config.num_test),
        (unpaired, labels / "testset_nonref" / UNPAIRED_NAME, held_out, config.num_test),
    )
    for number, (folder, label_folder, sources, count) in enumerate(parts):
        for name, clear, under_water in scenes(sources, count, config.size, (config.seed, number)):
            write_png(folder / "input" / name, under_water)
            if folder != unpaired:
                write_png(folder / "target" / name, clear)
            write_label(label_folder, Path(name), under_water)
        print(
            f"{folder}: {counted(count, 'picture')}, labels in {label_folder} ({COLOURS})",
            flush=True,
        )


def find_photographs(folder: str | None) -> list[Path]:
    """Return the photographs of a folder or, without one, of the installed packages.

    Raises UserError.
    """
    if folder is not None:
        found = [Path(folder) / path for path in list_pictures(Path(folder))]
        if len(found) < 2:
            raise UserError(
                f"--images {folder}: {len(found)} pictures; at least 2 are needed, one for the "
                "test sets"
            )
        return found
    found = []
    for package, place, names in PACKAGED:
        spec = util.find_spec(package)
        if spec is None or spec.origin is None:
            raise UserError(
                f"{package} is missing: pip install -r requirements.txt in this folder, or use "
                "--images"
            )
        found += [
            path for name in names if (path := Path(spec.origin).parent / place / name).is_file()
        ]
    return found


def split(photographs: list[Path], seed: int) -> tuple[list[Path], list[Path]]:
    """Return the photographs for training and those for the test sets."""
    order = np.random.default_rng(seed).permutation(len(photographs))
    num_held_out = max(1, round(len(photographs) * HELD_OUT_SHARE))
    mixed = [photographs[index] for index in order]
    return mixed[num_held_out:], mixed[:num_held_out]


def scenes(
    photographs: list[Path], count: int, size_px: int, seed: tuple[int, int]
) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Yield `count` scenes as (file name, clear picture, the same under water).

    A broken photograph is left out.
    """
    usable = []
    for path in photographs:
        try:
            usable.append(resize_short_side(read_image(path, 4 * size_px), 2 * size_px))
        except ImageError as error:
            print_warning(f"{error}: left out")
    if not usable:
        raise UserError(
            f"none of {len(photographs)} photographs can be read, the first is {photographs[0]}"
        )
    for number in range(count):
        rng = np.random.default_rng((*seed, number))
        clear = draw_crop(usable[number % len(usable)], size_px, rng)
        water = draw_water(rng)
        range_m = draw_range_m(rng, size_px, size_px, reach_m(water.jerlov)[0])
        yield f"{number:05d}_{water.jerlov}.png", clear, submerge(clear, range_m, water, rng)


def resize_short_side(image: np.ndarray, side_px: int) -> np.ndarray:
    """Shrink (never enlarge) so that the shorter side is `side_px`."""
    scale = side_px / min(image.shape[:2])
    return (
        image
        if scale >= 1
        else resize_area(image, round(image.shape[1] * scale), round(image.shape[0] * scale))
    )


def draw_crop(photo: np.ndarray, size_px: int, rng: np.random.Generator) -> np.ndarray:
    """Return a random square of a photograph, perhaps mirrored, as (size, size, 3)."""
    height, width = photo.shape[:2]
    side = int(rng.uniform(SMALLEST_CROP, 1) * min(height, width))
    top, left = int(rng.integers(height - side + 1)), int(rng.integers(width - side + 1))
    crop = photo[top : top + side, left : left + side]
    return resize_area(
        np.ascontiguousarray(crop[:, ::-1] if rng.integers(2) else crop), size_px, size_px
    )


def write_png(path: Path, image: np.ndarray) -> None:
    """Write RGB uint8 as PNG, atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes_atomic(
        path, cv2.imencode(".png", cv2.cvtColor(image, cv2.COLOR_RGB2BGR))[1].tobytes()
    )
