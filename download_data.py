"""Download EPRI's label file and circuits from the publisher, a mirror or a folder; or write the
sample.

    python download_data.py                       # circuits 1 and 10 (tens of GB)
    python download_data.py --max-images 50       # 50 photographs per circuit
    python download_data.py --circuits 1 10 13b   # or `--circuits all`
    python download_data.py --base-url /mnt/epri  # a folder or https address
    python download_data.py --source s3://bucket/epri   # all files of a folder in an object storage
    python download_data.py --sample              # 240 drawn photographs
    python download_data.py --sample 40 --sample-size 5472   # of 20 megapixels

Run the same command again after any interruption. The photographs are EPRI's, licence CC BY-SA 4.0.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from yolo_seg_ddp.prepare.download import DEFAULT_BASE_URL, download, expand_circuits, open_source
from yolo_seg_ddp.utils.config import parse_config
from yolo_seg_ddp.utils.errors import EXIT_DONE, EXIT_KEYBOARD, UserError, run_script
from yolo_seg_ddp.utils.files import claimed_output, output_folder
from yolo_seg_ddp.utils.options import Options, option, words_of
from yolo_seg_ddp.utils.storage import Storage
from yolo_seg_ddp.utils.text import counted, next_command

DEFAULT_SAMPLE = 240


@dataclass(frozen=True)
class DownloadConfig(Options):
    """Options of download_data.py."""

    circuits: tuple[str, ...] = option(
        ("1", "10"),
        "circuits such as 1 10 13b, or all",
        metavar="CIRCUIT",
        needs=("not sample", "not source"),
    )
    base_url: str = option(
        DEFAULT_BASE_URL,
        "https address, or local folder, that holds the label file and the zips",
        metavar="URL",
        needs=("not sample", "not source"),
    )
    source: str | None = option(
        None,
        "folder in an object storage, such as s3://bucket/epri: get all files there "
        "(docs/storage.md)",
        metavar="ADDRESS",
        needs="not sample",
    )
    max_images: int | None = option(
        None,
        "take only N photographs per circuit, by range requests",
        metavar="N",
        at_least=1,
        needs=("not sample", "not source"),
    )
    output: str = option(
        "data/raw",
        "folder for the label file and one folder of photographs per circuit",
        metavar="FOLDER",
    )
    keep_zips: bool = option(
        False,
        "keep each zip after its photographs are extracted",
        needs=("not sample", "not source", "not max_images"),
    )
    sample: int | None = option(
        None,
        f"write the built-in sample of N photographs ({DEFAULT_SAMPLE} without N) instead",
        metavar="[N]",
        at_least=1,
    )
    sample_size: int | None = option(
        None,
        "longer side of the sample's photographs in pixels, such as 5472 for a drone's; unset: "
        "1280",
        metavar="PX",
        at_least=1280,
        at_most=8192,
        needs="sample",
    )
    wire_width: float | None = option(
        None,
        "width of the sample's wires in pixels; unset: 14 (in photographs 1280 pixels wide), or 4 "
        "to 10 with --sample-size",
        metavar="PX",
        needs="sample",
    )
    seed: int = option(0, "seed of the built-in sample", needs="sample")
    config: str | None = option(None, "YAML file with any of these options", metavar="FILE")


def main(argv: Sequence[str] | None = None) -> int:
    """Download the data, or write the sample; return the exit code."""
    config = parse_config(
        DownloadConfig, __doc__, with_sample_size(sys.argv[1:] if argv is None else argv)
    )
    try:
        if config.sample is not None:
            output_folder(config.output)
            return _write_sample(config, config.sample)
        if config.source:
            return _fetch_files(config.output, Storage(config.source, "--source"))
        source = open_source(config.base_url)
        folder = Path(config.output)
        circuits = expand_circuits(source, config.circuits)
        report = download(
            source, folder, circuits, max_images=config.max_images, keep_zips=config.keep_zips
        )
    except KeyboardInterrupt:
        print(
            "stopped by the keyboard; run the same command again to continue",
            file=sys.stderr,
            flush=True,
        )
        return EXIT_KEYBOARD
    if report.is_unchanged:
        print(
            f"{config.output}: all {report.num_photographs:,} photographs are there, nothing to do"
        )
    else:
        print(f"{config.output}: {counted(report.num_photographs, 'photograph')}; {report.summary}")
    if report.missing:
        raise UserError(
            f"{source.shown()} has no {', '.join(report.missing)}; check --circuits and --base-url"
        )
    print(next_command("python", "parse_labels.py"))
    return EXIT_DONE


def _fetch_files(output: str, storage: Storage) -> int:
    files = storage.files()
    if not files:
        raise UserError(f"{storage.shown}: no files there; check the address")
    with claimed_output(output) as folder:
        num_new = storage.fetch_all(files, folder)
    print(f"{output}: {counted(len(files), 'file')} of {storage.shown}, {num_new:,} of them new")
    print(next_command("python", "parse_labels.py", *words_of({"input": output})))
    return EXIT_DONE


def with_sample_size(arguments: Sequence[str]) -> list[str]:
    """Insert the default number after a `--sample` without one."""
    completed: list[str] = []
    for index, argument in enumerate(arguments):
        completed.append(argument)
        if argument == "--sample" and (
            index + 1 == len(arguments) or arguments[index + 1].startswith("-")
        ):
            completed.append(str(DEFAULT_SAMPLE))
    return completed


def _write_sample(config: DownloadConfig, num_photographs: int) -> int:
    from yolo_seg_ddp.prepare.sample import write_sample

    write_sample(
        Path(config.output), num_photographs, config.seed, config.wire_width, config.sample_size
    )
    print(f"{config.output}: {num_photographs:,} drawn photographs")
    # Wires are labelled as lines: as wide as they were drawn, or as the middle of 4 to 10 pixels.
    options = words_of(
        {
            "input": config.output,
            "line_width": config.wire_width or (7 if config.sample_size else 14),
        }
    )
    print(next_command("python", "parse_labels.py", *options))
    return EXIT_DONE


if __name__ == "__main__":
    run_script(main)
