"""Make data of known order: damaged crops of photographs, and annotators of known reliability who
compare them.

    python make_data.py                                 # from scikit-image and scikit-learn
    python make_data.py --images DIR --reliability 0.7

Writes below --output:
    images/                       the pictures; their names tell photograph, damage and category
    gold_batch.json, Anchor_Anchor.json, Anchor_Regular.json
                                  comparisons by one crowd (--data-source local)
    known_order.json              each picture's quality: minus its level of damage
    users/<user>/comparison_data.json, annotators.json
                                  logs of single annotators, as in S3; their reliabilities
    simulated/                    the same logs in the prepared format (--prepared-data-dir);
                                  prepared/ is for those of S3
    unseen/                       lists, images and order of photographs that no other folder shows
"""

import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]  # where the package crowd_bt is
import cv2
import numpy as np
from crowd_bt.annotators import read_crowd
from crowd_bt.comparisons import LISTS, ORDER_FILE, write_json, write_prepared
from crowd_bt.images import image_files

from yolo_seg_ddp.data.images import ImageError, read_image, resize_area
from yolo_seg_ddp.utils.config import parse_config
from yolo_seg_ddp.utils.errors import EXIT_DONE, UserError, one_line, print_warning, run_script
from yolo_seg_ddp.utils.options import Options, option

# Strength of each damage at levels 1 to 6; level 0 is the untouched crop.
BLUR_SIGMA_PX = (0.5, 0.8, 1.2, 1.7, 2.4, 3.4)
NOISE_DEVIATION = (4, 8, 13, 20, 29, 40)  # of 255
JPEG_QUALITY = (55, 35, 22, 14, 9, 5)
CATEGORIES = ("goldensample", "POS_5", "POS_4", "POS_3", "POS_2", "POS_1", "POS_0")  # by level
DAMAGES = ("blur", "noise", "jpeg")
ROLES = ("gold", "anchor", "regular")
LIST_TYPES = ("gold_gold", "anchor_anchor", "anchor_regular")
UNSEEN_EVERY = 3  # every third photograph is kept for unseen/
MIN_DETAIL = 6.0  # mean difference of neighbouring pixels, of 255: in a flat crop nobody sees blur
MOST_ENLARGED = 3.0  # a crop shows at most this many times the side of a picture, shrunk to it
HONEST = 0.975  # reliability of an annotator who does not guess
DRAW_SHARE = 0.007  # of all comparisons, as in the guide's data
# Real colour photographs with detail all over, from the packages themselves: nothing is downloaded.
SKIMAGE_PHOTOGRAPHS = ("astronaut", "coffee", "chelsea", "rocket", "immunohistochemistry")
SKIMAGE_GREY = ("brick", "grass", "gravel", "camera", "coins")


@dataclass(frozen=True)
class MakeConfig(Options):
    images: str | None = option(
        None, "folder of photographs; unset: those of scikit-image and scikit-learn", metavar="DIR"
    )
    output: str = option("data", "folder to write", metavar="DIR")
    size: int = option(96, "side of the pictures in pixels", at_least=32)
    num_pictures: int = option(280, "pictures of the photographs for training", at_least=42)
    num_unseen: int = option(140, "pictures of the unseen photographs", at_least=14)
    comparisons: int = option(3000, "comparisons in the lists", at_least=60)
    reliability: float = option(
        0.9,
        "of the lists' crowd: the probability of a right answer; 0.5 guesses",
        at_least=0,
        at_most=1,
    )
    annotators: int = option(12, "single annotators, each with a log", at_least=1)
    per_annotator: int = option(250, "comparisons of each annotator", at_least=10)
    guessing: float = option(1 / 3, "share of the annotators who only guess", at_least=0, at_most=1)
    seed: int = option(0, "seed", at_least=0)


@dataclass(frozen=True)
class Picture:
    """A damaged crop: its file name and its level of damage, 0 to 6."""

    name: str
    level: int

    @property
    def category(self) -> str:
        return CATEGORIES[self.level]


def main() -> int:
    """Write the data; return the exit code."""
    make(parse_config(MakeConfig, "Make comparisons of known order"))
    return EXIT_DONE


def make(config: MakeConfig) -> None:
    """Write the data. Raises UserError."""
    output = Path(config.output)
    if output.is_dir() and any(output.iterdir()):
        raise UserError(f"--output {output}: not empty; remove it, or name another folder")
    photographs = list(
        read_folder(Path(config.images)) if config.images else included_photographs()
    )
    if len(photographs) < 2:
        raise UserError(
            f"--images {config.images}: {len(photographs)} usable photographs; at least 2 are "
            "needed"
        )
    unseen = photographs[1::UNSEEN_EVERY]
    seen = [
        photograph for number, photograph in enumerate(photographs) if number % UNSEEN_EVERY != 1
    ]
    generator = np.random.default_rng(config.seed)
    pictures = write_pictures(output / "images", seen, config.num_pictures, config.size, generator)
    write_lists(output, pictures, config.comparisons, config.reliability, generator)
    write_annotators(output, pictures, config, generator)
    held_out = write_pictures(
        output / "unseen" / "images", unseen, config.num_unseen, config.size, generator
    )
    write_lists(output / "unseen", held_out, config.comparisons // 4, 1.0, generator)
    print(
        f"{output}: {len(pictures)} pictures of {len(seen)} photographs, {config.comparisons} "
        "comparisons by a crowd of "
        f"reliability {config.reliability:g}, {config.annotators} annotators' logs"
    )
    print(
        f"{output / 'unseen'}: {len(held_out)} pictures of {len(unseen)} other photographs, "
        "compared without errors"
    )


def read_folder(folder: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (name, RGB uint8) of the photographs in a folder, with a warning for each that cannot
    be read.
    """
    for file in image_files(folder):
        try:
            yield file.stem, read_image(file, min_long_side_px=2000)
        except ImageError as error:
            print_warning(f"{error}; left out")


def included_photographs() -> list[tuple[str, np.ndarray]]:
    """Return (name, RGB uint8) of the photographs that come with scikit-image and scikit-learn."""
    try:
        from skimage import data
        from sklearn.datasets import load_sample_images
    except ImportError as error:
        raise UserError(
            "scikit-image or scikit-learn is missing: pip install -r requirements.txt, or use "
            "--images DIR"
        ) from error
    samples = load_sample_images()
    photographs = [
        (Path(name).stem, image)
        for name, image in zip(samples.filenames, samples.images, strict=True)
    ]
    for name in (*SKIMAGE_PHOTOGRAPHS, *SKIMAGE_GREY):
        try:
            image = getattr(data, name)()
        # Another version may not contain it.
        except (OSError, ImportError, ValueError) as error:
            print_warning(f"scikit-image has no {name} here ({one_line(error, 80)}); left out")
            continue
        photographs.append((name, image if image.ndim == 3 else np.repeat(image[:, :, None], 3, 2)))
    return photographs


def write_pictures(
    folder: Path,
    photographs: Sequence[tuple[str, np.ndarray]],
    number: int,
    size_px: int,
    generator: np.random.Generator,
) -> list[Picture]:
    """Write damaged crops, equally many of each level and photograph, as PNG files; return them
    shuffled.
    """
    folder.mkdir(parents=True)
    pictures = []
    for position in range(number):
        title, photograph = photographs[position % len(photographs)]
        level = position // len(photographs) % len(CATEGORIES)
        damage = DAMAGES[int(generator.integers(len(DAMAGES)))] if level else "none"
        picture = damaged(detailed_crop(photograph, size_px, generator), damage, level, generator)
        name = f"{position:04d}_{title}_{damage}_{CATEGORIES[level]}.png"
        if not cv2.imwrite(str(folder / name), picture[:, :, ::-1]):
            raise UserError(f"{folder / name}: cannot be written")
        pictures.append(Picture(name, level))
    return [pictures[position] for position in generator.permutation(number)]


def detailed_crop(
    photograph: np.ndarray, size_px: int, generator: np.random.Generator
) -> np.ndarray:
    """Return a square crop, shrunk to `size_px`; of up to 20 random ones the first with detail,
    else the most detailed.
    """
    height, width = photograph.shape[:2]
    shortest = min(height, width)
    best = np.zeros((size_px, size_px, 3), np.uint8)
    most = -1.0
    for _ in range(20):
        side = int(min(size_px * generator.uniform(1.5, MOST_ENLARGED), shortest))
        top, left = (int(generator.integers(length - side + 1)) for length in (height, width))
        crop = resize_area(
            np.ascontiguousarray(photograph[top : top + side, left : left + side]), size_px, size_px
        )
        detail = float(np.abs(np.diff(crop.astype(np.float32), axis=0)).mean())
        if detail > most:
            best, most = crop, detail
        if most >= MIN_DETAIL:
            break
    return best


def damaged(
    image: np.ndarray, damage: str, level: int, generator: np.random.Generator
) -> np.ndarray:
    """Return an image with one kind of damage at a level from 1 to 6;
    at level 0 the image itself.
    """
    if level == 0:
        return image
    if damage == "blur":
        return cv2.GaussianBlur(image, (0, 0), BLUR_SIGMA_PX[level - 1])
    if damage == "noise":
        noisy = image + generator.normal(0, NOISE_DEVIATION[level - 1], image.shape)
        return np.clip(np.rint(noisy), 0, 255).astype(np.uint8)
    _, data = cv2.imencode(".jpg", image, [cv2.IMWRITE_JPEG_QUALITY, JPEG_QUALITY[level - 1]])
    return np.asarray(cv2.imdecode(data, cv2.IMREAD_COLOR))


def compare(
    first: Picture, second: Picture, reliability: float, generator: np.random.Generator
) -> str:
    """Return an annotator's answer: right with the probability `reliability`; at 0.5 it is a guess,
    at 0 the opposite.
    """
    if generator.random() >= abs(2 * reliability - 1):
        return "left" if generator.random() < 0.5 else "right"
    if first.level == second.level:
        return "draw"
    return "left" if (first.level < second.level) == (reliability > 0.5) else "right"


def random_pairs(
    left: Sequence[Picture], right: Sequence[Picture], number: int, generator: np.random.Generator
) -> Iterator[tuple[Picture, Picture]]:
    """Yield pairs of different level, and now and then, as in real data, one of the same."""
    for _ in range(number):
        wants_draw = generator.random() < DRAW_SHARE
        for _ in range(1000):
            pair = (
                left[int(generator.integers(len(left)))],
                right[int(generator.integers(len(right)))],
            )
            if pair[0] is not pair[1] and (pair[0].level == pair[1].level) == wants_draw:
                break
        yield pair if generator.random() < 0.5 else pair[::-1]


def write_lists(
    folder: Path,
    pictures: Sequence[Picture],
    number: int,
    reliability: float,
    generator: np.random.Generator,
) -> None:
    """Write the three lists of one crowd's answers, a third of the comparisons each, and the known
    order.
    """
    for name, kind in zip(LISTS, LIST_TYPES, strict=True):
        items = []
        for one, other in random_pairs(*sides(pictures, kind), number // len(LISTS), generator):
            choice = compare(one, other, reliability, generator)
            items.append(
                {"img1": one.name, "img2": other.name, "expected_choice": choice, "type": kind}
            )
        write_json(folder / name, items)
    write_json(folder / ORDER_FILE, {picture.name: -picture.level for picture in pictures})


def sides(pictures: Sequence[Picture], kind: str) -> tuple[list[Picture], list[Picture]]:
    """Return the pictures for the sides of a pair type: each picture is a gold, an anchor or a
    regular one.
    """
    of_role = {
        role: list(itertools.islice(pictures, number, None, len(ROLES)))
        for number, role in enumerate(ROLES)
    }
    left, right = kind.split("_")
    return of_role[left], of_role[right]


def write_annotators(
    output: Path, pictures: Sequence[Picture], config: MakeConfig, generator: np.random.Generator
) -> None:
    """Write each annotator's log as it lies in S3, all logs in the prepared format, and the true
    reliabilities.
    """
    num_guessing = round(config.guessing * config.annotators)
    people = range(config.annotators)
    reliabilities = {
        f"user{number:02d}": 0.5 if number < num_guessing else HONEST for number in people
    }
    logs = {}
    for user, reliability in reliabilities.items():
        items = []
        for kind in itertools.islice(itertools.cycle(LIST_TYPES), config.per_annotator):
            ((one, other),) = random_pairs(*sides(pictures, kind), 1, generator)
            choice = compare(one, other, reliability, generator)
            names = {"img1": one.name, "img2": other.name, "choice": choice, "pair_type": kind}
            items.append({**names, "img1_category": one.category, "img2_category": other.category})
        logs[user] = {"comparisons": items}
        write_json(output / "users" / user / "comparison_data.json", logs[user])
    write_json(output / "annotators.json", reliabilities)
    crowd = read_crowd(logs)
    metadata = {"source": "make_data.py", "user_reliabilities": crowd.reliabilities}
    write_prepared(output / "simulated", crowd.rows, metadata, config.seed)
    write_json(
        output / "simulated" / ORDER_FILE, {picture.name: -picture.level for picture in pictures}
    )


if __name__ == "__main__":
    run_script(main)
