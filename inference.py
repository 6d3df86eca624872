"""Find objects in photographs with a trained model; write annotated pictures, JSON and YOLO labels.

    python inference.py --model models/epri_distribution_ddp/best.pt --source photos
    python inference.py --model best.pt --source flight.mp4 --every 5   # a film

Two photographs a core are read ahead, so memory does not grow with their number. All results are in
the photographs' own pixels, upright. A photograph that cannot be read, or whose results cannot be
written, is named and skipped. Started with torchrun, the ranks share the photographs. A model that
was trained on windows predicts on tiles of large photographs (docs/windows.md). The model may be an
export (yolo_seg_ddp/extras/exports/README.md). `python -m yolo_seg_ddp maps` puts the detections on
a map.

Deployment: a program of your own opens the model once, or an export that finds the same
(docs/python.md):

    from yolo_seg_ddp import open_model

    # format="engine": TensorRT
    file = open_model("models/epri_distribution_ddp/best.pt").export(format="onnx")
    model = open_model(file, conf=0.25)
    for prediction in model("photos", stream=True):
        print(prediction.file, prediction)  # 3 detections of 2 classes in 640 x 480: 2 pole, 1 wire
"""

from yolo_seg_ddp.predict.options import InferenceConfig
from yolo_seg_ddp.utils.config import parse_config, show_help

if __name__ == "__main__":
    show_help(InferenceConfig, __doc__)

# --- the command, which needs PyTorch

import itertools
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from yolo_seg_ddp.data.dataset_yaml import list_photos
from yolo_seg_ddp.data.images import NATIVE_LONG_SIDE_PX, ImageError, Stretch, read_image
from yolo_seg_ddp.pages import NO_DETECTIONS, READABLE_PX, draw_instances, save_image
from yolo_seg_ddp.predict.annotation_files import (
    ToolFiles,
    ToolWriter,
    common_folder,
    merge_tool_files,
)
from yolo_seg_ddp.predict.opening import cores_of, open_predictor
from yolo_seg_ddp.predict.prediction_files import (
    ABOUT,
    PredictionWriter,
    Source,
    keys_of,
    merge_parts,
    remove_results,
)
from yolo_seg_ddp.predict.thresholds import Thresholds
from yolo_seg_ddp.utils import distributed
from yolo_seg_ddp.utils.distributed import cleanup_ddp, setup_ddp
from yolo_seg_ddp.utils.errors import printable, run_script
from yolo_seg_ddp.utils.extras import find_extra, refuse_orthophoto
from yolo_seg_ddp.utils.files import claimed_output, write_text_atomic
from yolo_seg_ddp.utils.progress import Progress
from yolo_seg_ddp.utils.signals import die_with_parent
from yolo_seg_ddp.utils.text import counted, without_mask_line
from yolo_seg_ddp.utils.threads import ordered_map
from yolo_seg_ddp.yolo.model import trained_stretch

MAX_NAME_BYTES = 255  # of a file on Linux's file systems


def main() -> int:
    """Predict; return the exit code."""
    film = find_extra("film")
    if film and film.names_film(sys.argv[1:]):
        return int(film.main())
    cv2.setNumThreads(0)
    config = parse_config(InferenceConfig, __doc__)
    die_with_parent()
    ranks = distributed.read_rank_environment()
    with claimed_output(config.output) as output:
        refuse_orthophoto("--source", config.source, "python -m yolo_seg_ddp orthophotos")
        return predict_photos(config, output, ranks)


def predict_photos(config: InferenceConfig, output: Path, ranks: distributed.RankInfo) -> int:
    """Predict on photographs, which the ranks share; return the exit code: 1
    if none could be read.
    """
    # 1. The model, and this rank's photographs.
    files = list_photos(config.source)
    predictor, names = open_predictor(config, ranks)
    setup_ddp(predictor.device, ranks)
    sources = [Source(position, *item) for position, item in enumerate(unique_keys(files))]
    mine = sources[ranks.rank :: ranks.world_size]

    # 2. What is written of each photograph, and summed over all.
    # of each class's detections, of those without a mask, of photographs
    counts = np.zeros(len(names) + 2, np.int64)
    model = Path(config.model).absolute()
    version = f"{model.parent.name}/{model.stem}"
    root = common_folder(config.source, files)
    tools = ToolFiles(output, names, root, version, config.save_coco, config.save_label_studio)
    guarantee = Thresholds.of(predictor)
    features: list[np.ndarray] = []
    # Of all predictions; see PhotoPrediction.
    spent_s, best_score = np.zeros(3), np.zeros(1)
    former = distributed.run_on_main(lambda: keys_of(output))

    # 3. The predictions.
    with (
        PredictionWriter(
            output, names, ranks.rank, guarantee.statement if guarantee else None
        ) as writer,
        ToolWriter(tools, ranks.rank) as tool_writer,
    ):
        photos = read_photos(mine, config, cores_of(ranks), trained_stretch(predictor.model))
        predictions = predictor.predict(photos)
        progress = Progress("photographs", len(mine), ranks.is_main)
        for source, photo, prediction in distributed.apart(progress(predictions)):
            writer.add(source, photo.shape, prediction)
            picture = draw_instances(
                photo, *prediction.drawn, names, nothing=NO_DETECTIONS, min_px=READABLE_PX
            )
            save_image(output / f"{source.key}.jpg", picture)
            if config.save_crops:
                writer.save_crops(source.key, photo, prediction)
            tool_writer.add(source, photo.shape, prediction)
            counts[:-2] += np.bincount(prediction.class_ids, minlength=len(names))
            counts[-2:] += (prediction.num_without_mask, 1)
            spent_s += prediction.spent_s
            best_score = np.maximum(best_score, prediction.best_score)
            if prediction.features is not None:
                features.append(np.append(source.position, prediction.features))

    # 4. What the ranks saw comes together. Every rank must reach this.
    gathered = {
        "counts": counts,
        "features": np.array(features),
        "spent_s": spent_s,
        "best_score": best_score,
    }
    parts = distributed.gather_arrays(gathered)
    summed = np.sum([part["counts"] for part in parts], axis=0)
    *totals, num_without_mask, num_read = summed.tolist()
    features = [part["features"] for part in parts]
    notes: list[str] = []
    if guarantee and num_read:
        notes = [guarantee.line, guarantee.compare(features, files)]
    about = {"model": config.model, "classes": names, "notes": notes}

    def finish() -> None:
        merge_parts(output, ranks.world_size)
        write_text_atomic(output / ABOUT, json.dumps(about, indent=1) + "\n")
        merge_tool_files(tools, ranks.world_size)

    distributed.run_on_main(finish)

    # 5. What was found, in words.
    if ranks.is_main:
        highest = max(float(part["best_score"].max()) for part in parts)
        pairs = zip(names, totals, strict=True)
        summary = ", ".join(f"{count} {name}" for name, count in pairs if count)
        if not summary:
            seen = f"the highest confidence seen is {highest:.3f}"
            summary = f"nothing ({seen}, --conf is {config.conf:g})"
        skipped = len(files) - num_read
        print(f"{counted(num_read, 'photograph')}, {skipped} skipped; found {summary}")
        if num_read:
            results = f"Results in {config.output}: pictures, labels/, predictions.json"
            print(", ".join([results, *tools.written]))
            each_ms = 1000 * float(sum(part["spent_s"].sum() for part in parts)) / num_read
            print(f"{each_ms:,.0f} ms per photograph to predict, without reading and writing")
        num_removed = remove_results(output, (former or set()) - keys_of(output))
        removed = (
            f"Removed {counted(num_removed, 'file')} of an earlier run on other photographs"
            if num_removed
            else ""
        )
        for line in filter(None, [without_mask_line(num_without_mask), *notes, removed]):
            print(line)
    cleanup_ddp()
    return 0 if num_read else 1


def read_photos(
    sources: list[Source], config: InferenceConfig, cores: int, stretch: Stretch | None
) -> Iterator[tuple[Source, np.ndarray]]:
    """Yield the photographs, two a core read ahead.

    Names those that cannot be read, or whose results cannot be written.
    """

    def read(source: Source) -> tuple[Source, Any]:
        try:
            names = [f"{source.key}.jpg"]
            last = config.max_detections - 1
            names += [f"{source.key}_{last}.jpg"] * config.save_crops
            longest = max(len(os.fsencode(name)) for name in names)
            if longest > MAX_NAME_BYTES:
                reason = (
                    f"results would have names of {longest} bytes, more than {MAX_NAME_BYTES}; "
                    "rename it"
                )
                raise ImageError(reason)
            photo = read_image(source.file, stretch=stretch)
            if max(photo.shape) > NATIVE_LONG_SIDE_PX:
                raise ImageError(
                    f"a JPEG with its detections has at most {NATIVE_LONG_SIDE_PX} pixels a side"
                )
            return source, photo
        except (ImageError, OSError) as error:
            return source, error

    for source, photo in ordered_map(read, sources, cores):
        if isinstance(photo, np.ndarray):
            yield source, photo
        else:
            print(
                f"skipped {printable(str(source.file), 400)}: {printable(str(photo), 400)}",
                flush=True,
            )


def unique_keys(files: list[Path]) -> Iterator[tuple[Path, str]]:
    """Yield each file with a unique name for its results: its stem, with a number if the stem
    occurred before.
    """
    stems = {file.stem.lower() for file in files}
    taken: set[str] = set()
    # Of each stem: numbers that were tried are not free later.
    numbers = {stem: itertools.count(1) for stem in stems}
    for file in files:
        key = file.stem
        if key.lower() in taken:
            numbered = (f"{file.stem}_{number}" for number in numbers[key.lower()])
            key = next(
                name for name in numbered if name.lower() not in stems and name.lower() not in taken
            )
        taken.add(key.lower())
        yield file, key


if __name__ == "__main__":
    run_script(main)
