"""Compare ways to read a window of a photograph: the block store against decoding the whole file, and others.

    python benchmarks/windows.py --data data/native/dataset.yaml
    python benchmarks/windows.py --data data/native/dataset.yaml --enlarge

One process, one thread, CPU time, all ways in turn on the same windows; the files are in the page cache. `--enlarge` makes
copies of 5472 x 3648 pixels with added noise, as large as a drone's files, and measures those. A window always has
--img-size pixels: at scale 0.5 it covers twice the side. PyTurboJPEG is measured where it is installed. The last line is
the time of decoding the whole file over that of the store, at scale 1.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # started by its path: Python would search this folder instead of the project's
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import cv2
import numpy as np
import simplejpeg

from benchmarks.input_pipeline import use_one_thread
from benchmarks.results import write_results
from utils.common.config import INPUT_SIZE, Options, option, parse_config
from utils.common.errors import run_script
from utils.common.text import format_table
from utils.data.augment import AugmentConfig
from utils.data.blocks import Box
from utils.data.dataset import SegmentationDataset, open_images, read_photos
from utils.data.dataset_yaml import load_dataset_yaml
from utils.data.images import encode_jpeg, read_image, resize_area
from utils.data.labels import Photo
from utils.data.windows import WindowConfig, WindowedPhotos, open_windows

ENLARGED = (5472, 3648)
NOISE = 16.0  # standard deviation before a slight blur: such a file has 6 MB, as many as a drone's
Way = Callable[[int, Box, float], np.ndarray]  # (photograph, window in its pixels, scale) -> pixels


@dataclass(frozen=True)
class WindowsConfig(Options):
    data: str = option(None, "data-set YAML whose photographs have their own size", metavar="YAML", required=True)
    enlarge: bool = option(False, "measure copies of the photographs enlarged to 5472 x 3648 pixels")
    photographs: int = option(8, "photographs to use", at_least=1)
    img_size: int = option(640, "side of a window in pixels of the network input", **INPUT_SIZE)
    scales: tuple[float, ...] = option((1.0, 0.6, 0.3), "scales of the windows", above=0, at_most=1)
    rounds: int = option(10, "windows of each photograph and scale; the median counts", at_least=1)
    samples: int = option(64, "training samples to time", at_least=1)
    output: str = option("outputs/benchmarks/windows", "folder for copies, caches and results", metavar="DIR")


class Ways:
    """The ways to read a window of some photographs."""

    def __init__(self, photos: list[Photo], windowed: WindowedPhotos, raw_file: Path) -> None:
        self.files, self.store = [photo.file for photo in photos], windowed.store
        self.shapes = [self.store.shape(number) for number in range(len(photos))]
        self.raw = os.open(raw_file, os.O_RDONLY)
        self.raw_starts = np.cumsum([0, *(height * width * 3 for height, width in self.shapes)]).tolist()

    def by_name(self) -> dict[str, Way]:
        """Return all ways that this machine offers."""
        ways: dict[str, Way] = {
            "block store": self.from_store,
            "whole file, simplejpeg": self.from_whole,
            "whole file, OpenCV": self.from_opencv,
            "whole file at 1/2 or 1/4 where enough": self.from_scaled,
            "uncompressed file": self.from_raw,
        }
        try:
            from turbojpeg import TurboJPEG  # type: ignore[import-not-found]

            turbo = TurboJPEG(os.environ.get("TURBOJPEG"))
        except (ImportError, RuntimeError, OSError):
            return ways
        return {**ways, "libjpeg's lossless crop": lambda *window: self.from_crop(turbo, *window)}

    def from_store(self, photo: int, box: Box, scale: float) -> np.ndarray:
        """Read the blocks that the window touches. The augmentation's warp shrinks what is left, at no extra cost."""
        return self.store.read(photo, box, self.store.level_for(photo, scale))[0]

    def from_whole(self, photo: int, box: Box, scale: float) -> np.ndarray:
        """Decode the whole file and cut."""
        return _shrunk(_cut(simplejpeg.decode_jpeg(self.files[photo].read_bytes()), box), scale)

    def from_opencv(self, photo: int, box: Box, scale: float) -> np.ndarray:
        """Do the same with OpenCV."""
        pixels: Any = cv2.imdecode(np.frombuffer(self.files[photo].read_bytes(), np.uint8), cv2.IMREAD_COLOR_RGB)
        return _shrunk(_cut(pixels, box), scale)

    def from_scaled(self, photo: int, box: Box, scale: float) -> np.ndarray:
        """Decode the file at the smallest power of two that has the window's pixels."""
        height, width = self.shapes[photo]
        divisor = 4 if scale <= 0.25 else 2 if scale <= 0.5 else 1
        sides = {"min_height": -(-height // divisor), "min_width": -(-width // divisor)}
        pixels = simplejpeg.decode_jpeg(self.files[photo].read_bytes(), **sides)
        left, top, right, bottom = (side / divisor for side in box)
        return _shrunk(_cut(pixels, (left, top, right, bottom)), scale * divisor)

    def from_raw(self, photo: int, box: Box, scale: float) -> np.ndarray:
        """Read the window's rows of an uncompressed file."""
        width = self.shapes[photo][1]
        left, top, right, bottom = map(int, box)
        start = self.raw_starts[photo] + top * width * 3
        data = os.pread(self.raw, (bottom - top) * width * 3, start)
        return _shrunk(np.frombuffer(data, np.uint8).reshape(-1, width, 3)[:, left:right], scale)

    def from_crop(self, turbo: Any, photo: int, box: Box, scale: float) -> np.ndarray:
        """Let libjpeg-turbo cut the file without decoding, on its grid of 16 pixels, and decode the rest."""
        left, top = int(box[0]) // 16 * 16, int(box[1]) // 16 * 16
        part = turbo.crop(self.files[photo].read_bytes(), left, top, int(box[2]) - left, int(box[3]) - top)
        return _shrunk(simplejpeg.decode_jpeg(part), scale)


def _cut(pixels: np.ndarray, box: Box) -> np.ndarray:
    left, top, right, bottom = map(int, box)
    return pixels[top:bottom, left:right]


def _shrunk(pixels: np.ndarray, scale: float) -> np.ndarray:
    height, width = pixels.shape[:2]
    return resize_area(pixels, round(width * scale), round(height * scale))


def main() -> int:
    """Measure, print the tables and write the results; return the exit code."""
    config = parse_config(WindowsConfig, "Compare ways to read windows of photographs")
    use_one_thread()
    folder = Path(config.output).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    photos = read_photos(load_dataset_yaml(config.data), "train")[: config.photographs]
    if config.enlarge:
        photos = [enlarged(photo, folder, number) for number, photo in enumerate(photos)]
    windows = WindowConfig(per_photo=8, low_scale=0.5, high_scale=1.0)
    windowed = open_windows(photos, config.img_size, windows, 0, folder / "cache", "train", print)
    raw_file = folder / "uncompressed"
    with raw_file.open("wb") as output:
        for photo in photos:
            output.write(read_image(photo.file).tobytes())
    ways = Ways(photos, windowed, raw_file)
    times = measure_ways(ways, config)
    originals = sum(photo.file.stat().st_size for photo in photos)
    sizes = {"block store": windowed.store.index.pixel_file, "uncompressed file": raw_file}
    shares = {name: file.stat().st_size / originals for name, file in sizes.items()}
    raw_file.unlink()
    rows = [
        [name, *(f"{times[name][scale]:.1f}" for scale in config.scales), f"{shares.get(name, 1):.2f}"]
        for name in times
    ]
    print(format_table(["CPU ms per window", *(f"scale {scale:g}" for scale in config.scales), "bytes"], rows))
    samples = measure_samples(photos, windowed, config, folder)
    rows = [[name, f"{value:.1f}", f"{1000 / value:.0f}"] for name, value in samples.items()]
    print(format_table(["training samples", "CPU ms", "per CPU second"], rows))
    megapixels = float(np.mean([height * width for height, width in ways.shapes])) / 1e6
    print(f"{len(photos)} photographs, {megapixels:.1f} megapixels, {originals / len(photos) / 1e6:.1f} MB on average")
    scale = config.scales[0]
    ratio = times["whole file, simplejpeg"][scale] / times["block store"][scale]
    found: dict[str, Any] = {
        "cpu_ms_per_window": times,
        "bytes_relative_to_originals": shares,
        "cpu_ms_per_sample": samples,
    }
    write_results(folder / "results.json", config, **found, ratio=ratio)
    print(f"\nResults in {folder / 'results.json'}\nratio {ratio:.2f}")
    return 0


def enlarged(photo: Photo, folder: Path, number: int) -> Photo:
    """Return a photograph whose file is an enlarged and noisy copy; its labels are relative and stay."""
    file = folder / "enlarged" / f"{number}.jpg"
    if not file.exists():
        file.parent.mkdir(exist_ok=True)
        rng = np.random.default_rng(number)
        image = cv2.resize(read_image(photo.file), ENLARGED, interpolation=cv2.INTER_CUBIC).astype(np.float32)
        noise = cv2.GaussianBlur(rng.normal(0, NOISE, ENLARGED[::-1]).astype(np.float32), (0, 0), 0.7)
        file.write_bytes(encode_jpeg((image + noise[..., None]).clip(0, 255).astype(np.uint8), 93))
    return dataclasses.replace(photo, file=file)


def measure_ways(ways: Ways, config: WindowsConfig) -> dict[str, dict[float, float]]:
    """Return the median CPU ms of each way at each scale, all on the same random windows."""
    rng = np.random.default_rng(0)
    by_name = ways.by_name()
    spent: dict[str, dict[float, list[float]]] = {name: {scale: [] for scale in config.scales} for name in by_name}
    for scale in config.scales:
        for photo, (height, width) in enumerate(ways.shapes):
            for _ in range(config.rounds):
                side_x, side_y = (min(config.img_size / scale, side) for side in (width, height))
                left, top = rng.uniform(0, width - side_x), rng.uniform(0, height - side_y)
                for name, read in by_name.items():
                    start_s = time.process_time()
                    read(photo, (left, top, left + side_x, top + side_y), scale)
                    spent[name][scale].append((time.process_time() - start_s) * 1000)
    return {
        name: {scale: statistics.median(values) for scale, values in by_scale.items()}
        for name, by_scale in spent.items()
    }


def measure_samples(
    photos: list[Photo], windowed: WindowedPhotos, config: WindowsConfig, folder: Path
) -> dict[str, float]:
    """Return the CPU ms per augmented training sample, with labels: windows, and whole photographs from the packed cache."""
    packed = open_images([photo.file for photo in photos], config.img_size, folder / "cache", "train", print)
    spent: dict[str, list[float]] = {}
    for _ in range(3):
        for what, sources in (("windows", {"windowed": windowed}), ("whole photographs", {"packed": packed})):
            for kind, mosaic_epochs in (("mosaic of four", 10**9), ("one alone", 0)):
                options: dict[str, Any] = {"augment": AugmentConfig(), "mosaic_epochs": mosaic_epochs, **sources}
                data = SegmentationDataset(photos, config.img_size, **options)
                start_s = time.process_time()
                for number in range(config.samples):
                    data[divmod(number, len(data))]
                elapsed_ms = (time.process_time() - start_s) * 1000
                spent.setdefault(f"{what}, {kind}", []).append(elapsed_ms / config.samples)
    return {name: statistics.median(values) for name, values in spent.items()}


if __name__ == "__main__":
    run_script(main)
