"""Turn photographs and their labels, of any tool in docs/labels.md, into a YOLO-seg data set.

python parse_labels.py --input data/raw --output data/processed
python parse_labels.py --input contractor_a contractor_b   # each with its classes and format
python parse_labels.py --input s3://bucket/raw   # photographs stay there (docs/storage.md)
"""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from yolo_seg_ddp.data.dataset_yaml import DEFAULT_DATASET_YAML, TRUST_LINKS_HELP, load_dataset_yaml
from yolo_seg_ddp.data.images import NATIVE_LONG_SIDE_PX
from yolo_seg_ddp.data.label_shapes import class_sizes, sample_labels, small_labels_hint
from yolo_seg_ddp.data.labels import read_photos
from yolo_seg_ddp.pages.label_picture import save_label_picture
from yolo_seg_ddp.prepare.parsing.account import SIZE_PX, account_lines
from yolo_seg_ddp.prepare.parsing.build import BuildOptions, build_dataset
from yolo_seg_ddp.prepare.parsing.formats import AUTO, EPRI, FORMAT_CHOICES, FORMATS
from yolo_seg_ddp.prepare.parsing.manifest import UNREADABLE_KINDS, report_lines
from yolo_seg_ddp.prepare.parsing.photograph import EXIF_FRAME_CHOICES, PhotographOptions
from yolo_seg_ddp.prepare.parsing.reading import choose_format
from yolo_seg_ddp.prepare.parsing.sources import Source, names_of_inputs
from yolo_seg_ddp.prepare.parsing.split import CIRCUIT, SPLIT_BY_CHOICES, TIME_GAP_S, TRAIN
from yolo_seg_ddp.prepare.parsing.state import DATASET_FILE, PICTURE_FILE
from yolo_seg_ddp.prepare.parsing.stored import stored_input
from yolo_seg_ddp.utils.config import parse_config
from yolo_seg_ddp.utils.errors import EXIT_DONE, UserError, print_warning, run_script
from yolo_seg_ddp.utils.extras import refuse_orthophoto
from yolo_seg_ddp.utils.options import Options, ignored, option
from yolo_seg_ddp.utils.text import next_command


@dataclass(frozen=True)
class ParseConfig(Options):
    """Options of parse_labels.py."""

    config: str | None = option(None, "YAML file with any of these options", metavar="FILE")
    input: tuple[str, ...] = option(
        ("data/raw",),
        "folder with the labels and the photographs, in folders or zips; or its address in an "
        "object storage; several become one data set, each with its classes and format",
        metavar="DIR",
    )
    format: str = option(
        AUTO,
        "format of the labels; auto: found by the content of the files",
        choices=FORMAT_CHOICES,
    )
    classes: tuple[str, ...] | None = option(
        None,
        "classes and their order; unset: those of the label file, and for EPRI's labels those of "
        "dataset.yaml",
    )
    boxes: tuple[str, ...] = option(
        (),
        "classes whose outlines are boxes around other shapes: they teach no mask (docs/labels.md)",
        metavar="CLASS",
    )
    output: str = option(
        "data/processed",
        "output folder; other files in its images and labels folders are removed",
        metavar="DIR",
    )
    long_side: int = option(
        1280,
        "longer side of the output images in pixels; smaller images keep their size; native: all "
        "do",
        words={"native": NATIVE_LONG_SIDE_PX},
        at_least=16,
        at_most=NATIVE_LONG_SIDE_PX,
    )
    line_width: float = option(
        6.0,
        "width of objects drawn as lines (EPRI's format, LabelMe, CVAT, VIA, RSML), in pixels of "
        "the original photograph",
        above=0,
        at_most=1000,
        needs=tuple(
            f"not format={name}" for name, reader in FORMATS.items() if not reader.has_lines
        ),
    )
    split_by: str = option(
        AUTO,
        "split by the input's folders train, val and test, by a hash of each photograph's name, "
        "by circuit (or folder), or by "
        "pauses in time; auto: by such folders if some hold val or test, else hash",
        choices=SPLIT_BY_CHOICES,
    )
    time_gap: float | None = option(
        None,
        f"longest pause in seconds inside a series, by EXIF; unset: {TIME_GAP_S:g}",
        at_least=0,
        needs="split_by=time",
        metavar="SECONDS",
    )
    val_fraction: float = option(
        0.2, "share of the photographs for validation, between 0 and 1", above=0, below=1
    )
    exif_frame: str = option(
        "auto",
        "whether outlines of EXIF-rotated photographs refer to upright or stored pixels",
        choices=EXIF_FRAME_CHOICES,
    )
    keep_unlabelled: bool = option(
        False, "keep photographs that the label file does not list, as images without objects"
    )
    keep_unusable: bool = option(
        False,
        "keep photographs whose objects all are unusable, as images without objects, and go on if "
        "more than half of the "
        "objects, or all of a class, are lost",
    )
    trust_links: bool = option(False, TRUST_LINKS_HELP)
    workers: int = option(0, "threads; 0: all usable cores", at_least=0)
    strict: bool = option(
        False, "exit with code 1 when a row, a photograph or a zip cannot be read"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Build the data set; return the exit code."""
    config = parse_config(ParseConfig, __doc__, argv)
    sources: list[Source] = []
    with ExitStack() as stack:
        for address, name in zip(config.input, names_of_inputs(config.input), strict=True):
            if "://" in address:  # a folder in a storage
                stored = stored_input(address, Path(config.output))
                place = stack.enter_context(stored)
            else:
                refuse_orthophoto("--input", address, "python -m yolo_seg_ddp orthophotos.cut")
                place = Path(address), Path.read_bytes
            label_format = choose_format(place[0]) if config.format == AUTO else config.format
            sources.append(Source(label_format, name, *place))
            for line in ignored(replace(config, format=label_format), ["line_width"], "needs"):
                print_warning(f"{address}: {line}")
        return build(config, sources)


def build(config: ParseConfig, sources: Sequence[Source]) -> int:
    """Build the data set and print what it contains and what was skipped; return the exit code."""
    options = BuildOptions(
        photograph=PhotographOptions(
            class_names=config.classes or load_dataset_yaml(DEFAULT_DATASET_YAML).names,
            long_side_px=config.long_side,
            line_width_px=config.line_width,
            exif_frame=config.exif_frame,
            boxes=config.boxes,
        ),
        split_by=config.split_by,
        val_fraction=config.val_fraction,
        keep_unlabelled=config.keep_unlabelled,
        keep_unusable=config.keep_unusable,
        use_file_classes=config.classes is None,
        time_gap_s=TIME_GAP_S if config.time_gap is None else config.time_gap,
    )
    start_s = time.monotonic()
    manifest = build_dataset(
        sources,
        Path(config.output),
        options,
        config.workers,
        trust_links=config.trust_links,
        announce=lambda line: print(line, flush=True),
    )
    formats = {source.label_format for source in sources}
    has_circuits = EPRI in formats or config.split_by == CIRCUIT
    print("\n".join(report_lines(manifest, has_circuits=has_circuits)))
    spec = load_dataset_yaml(Path(config.output) / DATASET_FILE, trust_links=config.trust_links)
    picture = Path(config.output) / PICTURE_FILE
    photos = {
        split: read_photos(spec, split)
        for split, number in manifest["counts"]["photographs"].items()
        if number
    }
    every = [photo for own in photos.values() for photo in own]
    sizes, rectangles = class_sizes(every, spec.names, manifest["photographs"], SIZE_PX)
    print("\n".join(account_lines(manifest, sizes, config.line_width, rectangles)))
    save_label_picture(picture, every, spec.names)
    print(f"{config.output}: ready after {time.monotonic() - start_s:.1f} s")
    hint, words = small_labels_hint(sample_labels(photos.get(TRAIN, [])), spec.names, SIZE_PX)
    size = words if "--img-size" in words else []
    if hint:
        native = (
            ""
            if size or config.long_side == NATIVE_LONG_SIDE_PX
            else ", parsed with --long-side native"
        )
        print(hint + native)
    command = next_command(
        "python", "check_data.py", "--data", Path(config.output) / DATASET_FILE, *size
    )
    print(f"{command}  # and look at {picture}")
    num_unreadable = sum(manifest["skipped"].get(kind, 0) for kind in UNREADABLE_KINDS)
    if config.strict and num_unreadable:
        raise UserError(
            f"--strict: {num_unreadable} of the rows, photographs and zips in "
            f"{' '.join(config.input)} were not read"
        )
    return EXIT_DONE


if __name__ == "__main__":
    run_script(main)
