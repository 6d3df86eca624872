"""The steps of a check: read everything, find, write check.html and check.json, print."""

import json
from pathlib import Path
from typing import Any

import torch

from yolo_seg_ddp.data.dataset_yaml import DatasetSpec, load_dataset_yaml
from yolo_seg_ddp.data.images import ImageError
from yolo_seg_ddp.data.label_shapes import sample_labels, small_labels_hint
from yolo_seg_ddp.data.labels import read_photos
from yolo_seg_ddp.extras.check.classes import check_classes, count_classes
from yolo_seg_ddp.extras.check.findings import KINDS, Finding, count_kinds, in_order, num_errors
from yolo_seg_ddp.extras.check.label_errors import LIMITS, find_contradictions
from yolo_seg_ddp.extras.check.options import FINDINGS, REPORT, CheckConfig
from yolo_seg_ddp.extras.check.page import build_page
from yolo_seg_ddp.extras.check.pictures import check_pictures, find_duplicates
from yolo_seg_ddp.extras.check.reading import read_all
from yolo_seg_ddp.predict.options import OVERLAP
from yolo_seg_ddp.predict.tiles import Predictor, choose_tiling
from yolo_seg_ddp.utils import distributed
from yolo_seg_ddp.utils.config import parse_config
from yolo_seg_ddp.utils.cores import usable_cpu_count
from yolo_seg_ddp.utils.devices import choose_device, choose_precision
from yolo_seg_ddp.utils.errors import EXIT_USAGE, UsageError, UserError, printable
from yolo_seg_ddp.utils.files import claimed_output, write_text_atomic
from yolo_seg_ddp.utils.text import counted, format_table, next_command
from yolo_seg_ddp.yolo.model import (
    YoloModel,
    choose_mask_score,
    load_for_prediction,
    require_classes,
    trained_size_px,
)

DEFAULT_SIZE_PX = 640  # the trainer's


def main(description: str) -> int:
    """Check a data set; return the exit code.

    Raises UserError for an error in the data, unless it is tolerated.
    """
    config = parse_config(CheckConfig, description)
    ranks = distributed.read_rank_environment()
    if ranks.world_size > 1:
        if ranks.is_main:
            raise UsageError("check_data.py is one process with threads: start it without torchrun")
        return EXIT_USAGE
    with claimed_output(config.output):
        return check(config)


def check(config: CheckConfig) -> int:
    """Do the work of `main`."""
    num_threads = config.num_workers or usable_cpu_count()
    spec = load_dataset_yaml(config.data, trust_links=config.trust_links)
    predictor = load_predictor(config, spec) if config.model else None
    size_px = predictor.size_px if predictor else config.img_size or DEFAULT_SIZE_PX
    try:
        labels = sample_labels(read_photos(spec, next(iter(spec.splits))))
        hint, words = small_labels_hint(labels, spec.names, size_px)
    # It is reported below.
    except (UserError, ImageError, OSError, StopIteration):
        hint, words = "", list[str]()
    if not config.img_size and not predictor and words[:1] == ["--img-size"]:
        size_px = int(words[1])
    entries, findings = read_all(spec, size_px, num_threads, print)
    findings += [finding for entry in entries for finding in entry.findings]
    pictures = [(entry.split, entry.file, entry.picture) for entry in entries if entry.picture]
    findings += check_pictures(pictures) + find_duplicates(pictures)
    counts = count_classes(entries, list(spec.splits), len(spec.names))
    findings += check_classes(counts, spec.names, spec.yaml_file)
    notes: list[str] = []
    if predictor:
        contradicted, notes = find_contradictions(entries, predictor, spec.names)
        findings += contradicted
    findings = in_order(findings)
    folder = Path(config.output)
    folder.mkdir(parents=True, exist_ok=True)
    errors = num_errors(findings)
    content = {
        "data": config.data,
        "model": config.model,
        "img_size": size_px,
        "names": spec.names,
        "num_errors": errors,
        "num_hints": len(findings) - errors,
        "counts": count_kinds(findings),
        "splits": counts,
        "notes": notes,
        "findings": [finding.to_dict() for finding in findings],
    }
    write_text_atomic(folder / FINDINGS, json.dumps(content, indent=1) + "\n")
    compared = (
        [f"Labels are compared with the predictions of {config.model}"] if config.model else []
    )
    about = [f"Small objects are judged at an input of {size_px} px", *compared, *notes]
    page = build_page(
        config.data, counts, spec.names, entries, findings, about, config.model is not None
    )
    write_text_atomic(folder / REPORT, page)
    words += (
        ["--img-size", str(config.img_size)]
        if config.img_size and "--img-size" not in words
        else []
    )
    print_results(config, counts, findings, notes, hint, words)
    if not any(entry.rows for entry in entries):
        raise UserError(
            f"{config.data}: no photograph has an object, so there is nothing to learn; check its "
            "labels"
        )
    if errors and (config.strict or not config.tolerate):
        error = next(finding for finding in findings if KINDS[finding.kind].is_error)
        first = printable(f"{error.place}: {error.text}", 400)
        raise UserError(
            f"{config.data} has {counted(errors, 'error')}; the first: {first}. Correct them, or "
            "pass --tolerate"
        )
    return 0


def load_predictor(config: CheckConfig, spec: DatasetSpec) -> Predictor:
    """Load the model and say how it is applied.

    Raises UserError if it was trained on other classes.
    """
    device = choose_device(config.device, 0)
    if device.type == "cpu" or config.threads:
        torch.set_num_threads(config.threads or config.num_workers or usable_cpu_count())
    model: YoloModel = load_for_prediction(str(config.model), device)
    require_classes(str(config.model), model, config.data, spec.names)
    size_px = config.img_size or trained_size_px(model)
    tiling = choose_tiling(config.tiles, OVERLAP, model, size_px)
    dtype = choose_precision(config.amp, device).dtype
    limits = {**LIMITS, "mask_score": choose_mask_score(None, model)}
    return Predictor(
        model, size_px, device, config.batch_size, tiling, limits, autocast_dtype=dtype
    )


def print_results(
    config: CheckConfig,
    counts: dict[str, Any],
    findings: list[Finding],
    notes: list[str],
    hint: str,
    options: list[str],
) -> None:
    """Print what was checked, a row for each kind of finding, where the report is, and how to
    train: with `options`.
    """
    for split, count in counts.items():
        print(
            f"{split}: {counted(count['photographs'], 'photograph')}, "
            f"{counted(count['objects'], 'object')}"
        )
    rows = []
    for kind, number in count_kinds(findings).items():
        if number:
            first = next(finding for finding in findings if finding.kind == kind)
            weight = "error" if KINDS[kind].is_error else "hint"
            rows.append([weight, KINDS[kind].title, number, printable(first.place, 200)])
    if rows:
        print(format_table(["", "finding", "number", "first"], rows, cut=3))
    for note in notes:
        print(note)
    errors = num_errors(findings)
    print(
        f"{counted(errors, 'error')}, {counted(len(findings) - errors, 'hint')}: "
        f"{config.output}/{REPORT} and {FINDINGS}"
    )
    if hint:
        print(hint)
    if errors:
        print(f"Next: open {config.output}/{REPORT}, correct the errors, and run this again")
    elif config.model is None:
        words = ["--model", "yolov8n-seg.pt"]
        # A run folder of the data set's name.
        if config.data != CheckConfig.data:
            words += [
                "--data",
                config.data,
                "--save-dir",
                f"models/{Path(config.data).absolute().parent.name}",
            ]
        print(next_command("python", "train_yolo_ddp.py", *words, *options))
