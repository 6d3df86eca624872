"""Compare how many training samples one core prepares: this project's loader and Ultralytics', on the same files.

    python benchmarks/input_pipeline.py
    python benchmarks/input_pipeline.py --raw data/raw --output /tmp/input_pipeline
    python benchmarks/input_pipeline.py --data data/processed/dataset.yaml --originals data/originals/dataset.yaml

One process, one thread, CPU time, both sides in turn, each with its default training augmentation. Small files: each side
reads the images that parse_labels.py wrote. Originals: Ultralytics decodes the camera's file for every sample, which is its
default; this project shrinks each file once. The last line is the ratio on small files with colour jitter.
"""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

if __package__ in (None, ""):  # started by its path: Python would search this folder instead of the project's
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks.comparison import Json, make_sample
from benchmarks.input_pipeline_sides import ORIGINAL_LONG_SIDE_PX, OurSide, Side, TheirSide, parse_raw
from benchmarks.results import results_file, write_results
from utils.common.config import INPUT_SIZE, Options, option, parse_config
from utils.common.environment import package_version, prepare_environment
from utils.common.errors import UsageError, UserError, run_script
from utils.common.text import format_table

SMALL, ORIGINALS = "small files", "originals"
PACKAGES = ("opencv-python", "numpy", "simplejpeg")


@dataclass(frozen=True)
class InputConfig(Options):
    data: str | None = option(None, "data-set YAML; unset: the built-in sample", metavar="YAML")
    originals: str | None = option(None, "data-set YAML whose images are the cameras' files", metavar="YAML")
    raw: str | None = option(
        None, "folder written by download_data.py, instead of --originals: parsed here at both sizes", metavar="DIR"
    )
    sample_images: int = option(160, "photographs of the built-in sample", at_least=10, needs="not data")
    img_size: int = option(640, "side of the square network input in pixels, a multiple of 32", **INPUT_SIZE)
    batch_size: int = option(16, "samples per batch", at_least=1)
    batches: int = option(4, "batches of each side per round", at_least=1)
    rounds: int = option(5, "rounds; the median counts", at_least=1)
    output: str = option("outputs/benchmarks/input_pipeline", "folder for sample, caches and results", metavar="DIR")
    json: str | None = option(None, "write the results here; unset: results.json in --output", metavar="FILE")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.originals and self.raw:
            raise UsageError("--originals and --raw: give one of them")


def main() -> int:
    """Run the comparison; return the exit code."""
    config = parse_config(InputConfig, "Compare the CPU time of a training sample here and with Ultralytics")
    use_one_thread()
    folder = Path(config.output).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    cases = [
        measure_case(config, name, our_data, their_data, folder, has_colour)
        for name, our_data, their_data in choose_data(config, folder)
        for has_colour in (True, False)
    ]
    results, ratio = results_file(config), cases[0]["ratio"]
    packages = {name: package_version(name) for name in PACKAGES}
    write_results(results, config, packages=packages, cases=cases, ratio=ratio)
    print(f"\nResults in {results}\nratio {ratio:.2f}")
    return 0


def use_one_thread() -> None:
    """Let OpenCV and PyTorch use one thread each in this process."""
    prepare_environment()
    import cv2
    import torch

    cv2.setNumThreads(0)
    torch.set_num_threads(1)


def choose_data(config: InputConfig, folder: Path) -> list[tuple[str, Path, Path]]:
    """Return (case, our YAML, their YAML) of each comparison."""
    small = Path(config.data) if config.data else make_sample(folder, config.sample_images, config.img_size)
    cases = [(SMALL, small, small)]
    if config.originals:
        cases.append((ORIGINALS, Path(config.originals), Path(config.originals)))
    if config.raw:
        parsed = parse_raw(Path(config.raw), folder / "raw-parsed", None)
        cases.append((ORIGINALS, parsed, parse_raw(Path(config.raw), folder / "raw-originals", ORIGINAL_LONG_SIDE_PX)))
    return cases


def measure_case(
    config: InputConfig, name: str, our_data: Path, their_data: Path, folder: Path, has_colour: bool
) -> Json:
    """Measure both sides in turn on one data set, print the table and return all results."""
    ours = OurSide(our_data, folder / "cache" / name.replace(" ", "-"), config.img_size, config.batch_size, has_colour)
    theirs = TheirSide(their_data, config.img_size, config.batch_size, has_colour)
    if len(ours.dataset) != len(theirs.dataset):
        raise UserError(f"{their_data}: {len(theirs.dataset)} usable images, but {our_data} has {len(ours.dataset)}")
    sides: dict[str, Side] = {"ours": ours, "theirs": theirs}
    for side in sides.values():
        for _ in range(-(-side.warm_up_samples // config.batch_size)):
            side.next_batch()
    rounds: dict[str, list[float]] = {who: [] for who in sides}
    with theirs.counting_decodes() as decoded:
        for number in range(config.rounds):
            # The sides take turns in going first, so that a drift of the machine's speed favours neither.
            for who in list(sides)[:: 1 if number % 2 == 0 else -1]:
                rounds[who].append(cpu_ms_per_sample(sides[who], config))
    medians = {who: statistics.median(values) for who, values in rounds.items()}
    record: Json = {
        "case": name,
        "has_colour_jitter": has_colour,
        "num_images": len(ours.dataset),
        "cpu_ms_per_sample": medians,
        "samples_per_cpu_s": {who: 1000 / value for who, value in medians.items()},
        "ratio": medians["theirs"] / medians["ours"],
        "cpu_ms_per_sample_by_round": rounds,
        "files_decoded_per_sample_by_theirs": len(decoded) / (config.rounds * config.batches * config.batch_size),
        "targets_per_sample": {
            who: side.num_targets(side.next_batch()) / config.batch_size for who, side in sides.items()
        },
    }
    print_case(record)
    return record


def cpu_ms_per_sample(side: Side, config: InputConfig) -> float:
    """Return the CPU ms of this process per sample of `side`, over one round."""
    start_s = time.process_time()
    for _ in range(config.batches):
        side.next_batch()
    return (time.process_time() - start_s) / (config.batches * config.batch_size) * 1000


def print_case(record: Json) -> None:
    """Print the CPU time per sample of both sides."""
    total, rate, targets = (record[name] for name in ("cpu_ms_per_sample", "samples_per_cpu_s", "targets_per_sample"))
    rows = [
        ["CPU ms per sample", f"{total['ours']:.2f}", f"{total['theirs']:.2f}"],
        ["samples per CPU second", f"{rate['ours']:.0f}", f"{rate['theirs']:.0f}"],
    ]
    print(
        f"\n{record['case']}, colour jitter {'on' if record['has_colour_jitter'] else 'off'}: ratio {record['ratio']:.2f}\n"
        f"{format_table(['', 'ours', 'Ultralytics'], rows)}\n"
        f"{record['num_images']} images, {targets['ours']:.1f} and {targets['theirs']:.1f} objects per sample; "
        f"Ultralytics decoded {record['files_decoded_per_sample_by_theirs']:.2f} files per sample",
        flush=True,
    )


if __name__ == "__main__":
    run_script(main)
