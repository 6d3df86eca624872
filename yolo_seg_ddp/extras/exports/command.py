"""The command `export.py`: its options and its steps."""

import errno
import json
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from yolo_seg_ddp.data.dataset import Photo, read_photos
from yolo_seg_ddp.data.dataset_yaml import load_dataset_yaml
from yolo_seg_ddp.extras.exports.conversion import (
    CalibrationImages,
    Variant,
    check_variants,
    convert,
    publish,
    scratch_folder,
)
from yolo_seg_ddp.extras.exports.exported import ExportMetadata, most_images, open_export
from yolo_seg_ddp.extras.exports.options import REPORT, ExportConfig
from yolo_seg_ddp.extras.exports.proof import Judge
from yolo_seg_ddp.extras.exports.report import (
    add_speed,
    inference_command,
    instead_of_ap,
    row_of,
    table,
)
from yolo_seg_ddp.predict.thresholds import Thresholds, digest_of_model
from yolo_seg_ddp.predict.tiles import choose_tiling
from yolo_seg_ddp.utils.config import config_of, parse_config
from yolo_seg_ddp.utils.cores import choose_threads_and_workers
from yolo_seg_ddp.utils.devices import choose_device
from yolo_seg_ddp.utils.environment import environment_report
from yolo_seg_ddp.utils.errors import UsageError
from yolo_seg_ddp.utils.files import claimed_output, write_text_atomic
from yolo_seg_ddp.utils.options import to_dict
from yolo_seg_ddp.utils.text import counted
from yolo_seg_ddp.yolo.model import (
    YoloModel,
    choose_mask_score,
    class_names,
    load_for_prediction,
    load_weights,
    require_classes,
    trained_label_lengths,
    trained_size_px,
    trained_stretch,
    trained_thin_classes,
    trained_windows,
    trained_wire_labels,
)


def run(description: str, arguments: Mapping[str, Any] | None = None) -> tuple[list[str], int]:
    """Export and prove; return the files that passed, and the exit code: 1 if a proof failed.

    arguments: options by their Python names; errors in them are raised. None: the command line.
    """
    if arguments is None:
        config = parse_config(ExportConfig, description)
    else:
        config = config_of(ExportConfig, arguments)
    with claimed_output(config.output or str(Path(config.model).parent)) as output:
        device = choose_device(config.device, 0)
        threads, workers = choose_threads_and_workers(1, 4, device.type)
        torch.set_num_threads(config.threads or threads)
        # The proof compares with true fp32.
        torch.backends.cudnn.allow_tf32 = False
        check_variants(variants_of(config), device)
        model = load_weights(config.model)
        spec = load_dataset_yaml(config.data, trust_links=config.trust_links)
        require_classes(config.model, model, config.data, spec.names)
        size_px = config.img_size or trained_size_px(model)
        if config.batch_size > most_images(size_px):
            raise UsageError(
                f"--batch-size {config.batch_size}: at most {most_images(size_px)} images of "
                f"{size_px} px"
            )
        thresholds = (
            Thresholds.text_of(config.thresholds, config.model, size_px)
            if config.thresholds
            else ""
        )
        tiling = choose_tiling(config.tiles, config.overlap, model, size_px)
        photos = evenly_spaced(read_photos(spec, "val", print), config.max_images)
        judge = Judge(photos, spec.names, size_px, device, tiling, workers)
        output.mkdir(parents=True, exist_ok=True)
        print(f"torch: AP on {counted(len(photos), 'photograph')}", flush=True)
        judge.learn(load_for_prediction(config.model, device))
        training = read_photos(spec, "train") if config.int8 else []
        files = [photo.file for photo in evenly_spaced(training, config.calibration_images)]
        rows = make_exports(
            config, model, judge, CalibrationImages(files, size_px, tiling), output, thresholds
        )
        if config.speed:
            rows = add_speed(rows, config.model, output, judge.inputs[: config.batch_size], device)
        report = {
            "config": to_dict(config),
            "environment": environment_report(),
            "input_px": size_px,
            "tiles_px": tiling.size_px if tiling else None,
            "num_photographs": len(photos),
            "rows": rows,
        }
        write_text_atomic(output / REPORT, json.dumps(report, indent=2) + "\n")
        print("\n".join([table(rows), *instead_of_ap(rows, config.model)]))
        failures = [failure for row in rows for failure in row["failures"]]
        first = f"; {len(failures)} failures, the first: {failures[0]}" if failures else ""
        print(f"Results in {output}: {REPORT}{first}")
        if use := inference_command(
            [row for row in rows if not thresholds or row.get("thresholds")], output
        ):
            print(use)
        made = [
            str(output / row["file"])
            for row in rows
            if row["format"] != "torch" and not row["failures"]
        ]
        return list(dict.fromkeys(made)), 1 if failures else 0


def make_exports(
    config: ExportConfig,
    model: YoloModel,
    judge: Judge,
    calibration: CalibrationImages,
    output: Path,
    thresholds: str,
) -> list[dict[str, Any]]:
    """Convert and prove each variant; move those that pass to `output`.

    Return the report's rows.
    """
    rows = []
    digest = digest_of_model(config.model)
    # so that the folder below is removed
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    # PyTorch aborts on a full disk
    if shutil.disk_usage(output).free < 4 * Path(config.model).stat().st_size:
        raise OSError(errno.ENOSPC, "no room for an export", str(output))
    with scratch_folder(output) as scratch:
        for variant in variants_of(config):
            # which computes with the bits of fp16
            is_exact = variant.precision == "fp32" and variant.kind != "engine"
            carried = thresholds if is_exact else ""
            metadata = ExportMetadata(
                class_names(model),
                judge.size_px,
                config.batch_size,
                config.dynamic,
                variant.precision,
                trained_windows(model),
                digest,
                [*trained_thin_classes(model)],
                label_lengths=trained_label_lengths(model),
                stretch=[*(trained_stretch(model) or ())],
                thresholds=carried,
                mask_score=choose_mask_score(None, model),
                **trained_wire_labels(model),
            )
            folder = Path(tempfile.mkdtemp(dir=scratch))
            print(f"{variant.kind} {variant.precision}: converting and comparing", flush=True)
            made = convert(
                model, variant, metadata, folder, Path(config.model).stem, calibration, judge.device
            )
            proof = judge.prove(open_export(made, judge.device), metadata, config.ap_tolerance)
            for failure in proof.failures:
                print(f"✗ {made.name}: {failure}; not written", flush=True)
            rows.append(row_of(variant, made, proof, has_thresholds=bool(carried)))
            if not proof.failures:
                publish(made, output / made.name)
                if carried != thresholds:
                    print(
                        f"{made.name} has other confidences, so no thresholds: judge it, "
                        "evaluate_model.py --guarantee"
                    )
    return rows


def variants_of(config: ExportConfig) -> list[Variant]:
    """Return the exports to make, format by format."""
    wanted = {"fp32": config.fp32, "fp16": config.half, "int8": config.int8}
    return [
        Variant(kind, precision)
        for kind in dict.fromkeys(config.format)
        for precision in wanted
        if wanted[precision]
    ]


def evenly_spaced(photos: list[Photo], most: int | None) -> list[Photo]:
    """Return at most `most` photographs, evenly spaced."""
    number = min(most or len(photos), len(photos))
    return [photos[index * len(photos) // number] for index in range(number)]
