"""Add photographs without labels to a data set: a trained model labels what it surely sees; what it
is unsure of is ignored.

    python -m yolo_seg_ddp unlabelled --model m/best.pt \\
        --labelled data/mine/dataset.yaml --photos flights/ --output data/more

Without --photos the labelled photographs have new classes, and the model adds those of its classes
that they have no labels of:

    python -m yolo_seg_ddp unlabelled --model m/best.pt \\
        --labelled data/new/dataset.yaml --output data/more

Then train on data/more/dataset.yaml. Started with torchrun, the ranks share the photographs. A
killed command continues: yolo_seg_ddp/extras/unlabelled/README.md.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from yolo_seg_ddp.data.dataset_yaml import (
    TRUST_LINKS_HELP,
    DatasetSpec,
    list_photos,
    load_dataset_yaml,
)
from yolo_seg_ddp.data.images import ImageError, read_image
from yolo_seg_ddp.data.labels import WHOLE, Photo, read_photos
from yolo_seg_ddp.evaluation.metrics.matching import IOU_THRESHOLDS, count_at_levels
from yolo_seg_ddp.extras.unlabelled.data_set import (
    NewData,
    Originals,
    free_names,
    renumbered_rows,
)
from yolo_seg_ddp.extras.unlabelled.judging import LEAST, Teacher, sure_from, trained_counts
from yolo_seg_ddp.extras.unlabelled.page import DISAGREES, LABEL, NO_BOUND, PAGE, UNSURE, write_page
from yolo_seg_ddp.predict.opening import cores_of, open_predictor
from yolo_seg_ddp.predict.options import ModelOptions, PredictOptions
from yolo_seg_ddp.predict.shift_features import deviations
from yolo_seg_ddp.predict.thresholds import (
    FEWEST_GROUPS,
    MOST_FALSE_ALARMS,
    digest_of_model,
    settings_of,
)
from yolo_seg_ddp.prepare.parsing.rows import digest_of
from yolo_seg_ddp.run.records import CONFIG_FILE, read_config
from yolo_seg_ddp.utils import distributed
from yolo_seg_ddp.utils.config import parse_config
from yolo_seg_ddp.utils.errors import UsageError, UserError, printable, run_script
from yolo_seg_ddp.utils.files import claimed_output
from yolo_seg_ddp.utils.options import FRACTION, option
from yolo_seg_ddp.utils.progress import Progress
from yolo_seg_ddp.utils.signals import die_with_parent
from yolo_seg_ddp.utils.text import next_command
from yolo_seg_ddp.utils.threads import ordered_map
from yolo_seg_ddp.yolo.model import require_classes, trained_size_px, trained_stretch

MOST = 1000  # detections in a photograph; what is beyond would become background


@dataclass(frozen=True)
class UnlabelledConfig(ModelOptions):
    """Options of `python -m yolo_seg_ddp unlabelled`."""

    labelled: tuple[str, ...] = option(
        None,
        "YAML of the labelled data set, with train and val; without --photos several, of any "
        "classes",
        required=True,
        metavar="FILE",
    )
    photos: str | None = option(
        None,
        "photographs without labels: folder, quoted pattern or .txt file; unset: the model adds "
        "its classes to the labelled photographs",
    )
    output: str = option(None, "folder for the new data set", required=True, metavar="DIR")
    sure_from: str | None = option(
        None,
        "YAML of a data set of the model's classes, whose val says what is sure; unset: as the "
        "model's file says of its validation",
        metavar="FILE",
        needs=("not photos", "not conf"),
    )
    conf: float | None = option(
        None, "confidence from which all classes are sure", needs="not photos", **FRACTION
    )
    wrong: float | None = option(
        None,
        "largest share of wrong labels of a class; unset: 0.05; without --photos 0.5, because a "
        "class without labels is forgotten",
        above=0,
        below=1,
        needs="not conf",
    )
    certainty: float | None = option(
        None,
        "certainty that it is not exceeded; unset: 0.9; without --photos 0.5",
        above=0,
        below=1,
        needs="not conf",
    )
    keep_unlike: bool = option(
        False, "also add photographs that look like no labelled one", needs="photos"
    )
    trust_links: bool = option(False, TRUST_LINKS_HELP)


def main(argv: Sequence[str] | None = None) -> int:
    """Write the data set; return the exit code."""
    cv2.setNumThreads(0)
    config = parse_config(UnlabelledConfig, __doc__, argv)
    die_with_parent()
    ranks = distributed.read_rank_environment()
    with claimed_output(config.output) as folder:
        specs = [open_data_set(file, "--labelled", config) for file in config.labelled]
        if config.photos and len(specs) > 1:
            raise UsageError("--labelled: with --photos it names one data set")
        try:
            if config.photos:
                add_photos(config, specs[0], folder, ranks)
            else:
                add_classes(config, specs, folder, ranks)
        except ImageError as error:
            raise UserError(f"{error}; check_data.py names all such photographs") from error
        distributed.cleanup_ddp()
    return 0


def add_photos(
    config: UnlabelledConfig, spec: DatasetSpec, folder: Path, ranks: distributed.RankInfo
) -> None:
    """Write a labelled data set with more photographs, which the model labels."""
    try:
        photos = list_photos(str(config.photos))
    except UserError as error:
        error.args = (str(error).replace("--source", "--photos"),)
        raise
    labelled = read_splits(spec)
    files = {split: free_names([photo.file for photo in of]) for split, of in labelled.items()}
    data = NewData(folder, free_names(photos, files["train"]))
    teacher, names = open_teacher(config, ranks)
    predictor = teacher.predictor
    require_classes(config.model, predictor.model, config.labelled[0], spec.names)
    distributed.setup_ddp(predictor.device, ranks)
    stretch = trained_stretch(predictor.model)
    originals = Originals(
        [(split, photo.file) for split, of in labelled.items() for photo in of], ranks
    )
    counts, judged = look_at_val(teacher, labelled["val"], names, ranks)
    sure = sure_by_counts(config, counts)
    levels = [level for level, _ in sure]
    judged = judged[: 0 if config.keep_unlike else None]
    settings: dict[str, Any] = {
        "model": digest_of_model(config.model),
        "levels": levels,
        "compared": len(judged),
    }
    settings |= settings_of(predictor, names) | {
        "labelled": sorted(map(bytes.hex, originals.digests))
    }
    for name, photo in waiting_photos(data, files, settings, stretch, ranks):
        if original := originals.shown_by(data.new[name], photo):
            note = {"left_out": "shows a labelled photograph", "reason": original, "found": []}
            data.add(name, {}, note, {})
        else:
            data.add(name, *look_at(photo, teacher, judged, levels), {})
    distributed.run_on_main(lambda: finish(config, data, spec, files, [words for _, words in sure]))


def add_classes(
    config: UnlabelledConfig,
    specs: Sequence[DatasetSpec],
    folder: Path,
    ranks: distributed.RankInfo,
) -> None:
    """Write the photographs of data sets with the classes of all of them and of the model: people's
    labels, and the model's where a set lacks one of its classes.
    """
    if Path(config.model).suffix != ".pt":
        raise UserError(f"--model {config.model}: no training goes on from it; name a .pt file")
    teacher, known = open_teacher(config, ranks)
    names = tuple(dict.fromkeys(chain(known, *(spec.names for spec in specs))))
    photos = [
        (photo, split, ids, np.delete(ids, photo.ignored_ids[photo.unsearched]))
        for spec in specs
        for ids in [[names.index(name) for name in spec.names]]
        for split, of_split in read_splits(spec).items()
        for photo in of_split
    ]
    # What people looked for in all of them.
    in_all = set.intersection(*({*numbers.tolist()} for *_, numbers in photos))
    listed = {names[number] for number in in_all}
    if {*known} <= listed:
        raise UserError(f"{config.labelled[0]}: has all classes of {config.model}: train on it")

    # 1. What is sure.
    distributed.setup_ddp(teacher.predictor.device, ranks)
    sure = sure_of_classes(config, teacher, known, ranks)
    levels = [level for level, _ in sure] + [None] * (len(names) - len(known))
    reasons = dict.fromkeys(names, "people labelled it")
    reasons |= {name: why for name, (_, why) in zip(known, sure, strict=True) if name not in listed}

    # 2. The photographs of all sets, by a name in the new one.
    new = free_names([photo.file for photo, *_ in photos])
    of_name = dict(zip(new, photos, strict=True))
    data = NewData(folder, new, {name: split for name, (_, split, *_) in of_name.items()})
    places: dict[str, dict[str, Path]] = {split: {} for _, split, *_ in photos}
    rows = {name: renumbered_rows(photo, ids) for name, (photo, _, ids, _) in of_name.items()}
    settings: dict[str, Any] = {
        "model": digest_of_model(config.model),
        "levels": levels,
        "rows": digest_of(repr(rows).encode()).hex(),
    }
    settings |= settings_of(teacher.predictor, known)

    # 3. Labels of people, and the model's of the other classes.
    stretch = trained_stretch(teacher.predictor.model)
    for name, pixels in waiting_photos(data, places, settings, stretch, ranks):
        photo, *_, numbers = of_name[name]
        outlines, note = look_at(pixels, teacher, np.zeros((0, 0)), levels, photo, numbers)

        # Nobody, and no model surely, looked for these.
        for number, level in enumerate(levels):
            if level is None and number not in numbers:
                outlines["ignore"].append((number, WHOLE))
        data.add(name, outlines, {**note, "left_out": ""}, rows[name])
    spec = replace(specs[0], names=names)
    distributed.run_on_main(lambda: finish(config, data, spec, places, [*reasons.values()]))


def sure_of_classes(
    config: UnlabelledConfig,
    teacher: Teacher,
    known: Sequence[str],
    ranks: distributed.RankInfo,
) -> list[tuple[float | None, str]]:
    """Return from which confidence on each class is sure, and in words why, see `sure_from`.

    Every rank must reach this.
    """
    if config.conf is not None:
        reason = f"from confidence {config.conf:g} on these become labels"
        return [(config.conf, reason) for _ in known]
    model, size_px = teacher.predictor.model, teacher.predictor.size_px
    if not config.sure_from:
        is_as_trained = size_px == trained_size_px(model) and config.mask_score is None
        counts = trained_counts(model, len(known)) if is_as_trained else None
    else:
        spec = open_data_set(config.sure_from, "--sure-from", config)
        require_classes(config.model, model, config.sure_from, spec.names)
        counts, _ = look_at_val(teacher, read_photos(spec, "val"), known, ranks)
    if counts is None:
        raise UserError(
            f"{config.model}: does not say from which confidence on it is right, with these "
            "options; name a labelled data set of its classes with --sure-from, or a confidence "
            "with --conf"
        )
    return sure_by_counts(config, counts)


def sure_by_counts(config: UnlabelledConfig, counts: np.ndarray) -> list[tuple[float | None, str]]:
    """Do what `sure_from` does for each class."""
    wrong, certainty = (0.05, 0.9) if config.photos else (0.5, 0.5)
    limits = (config.wrong or wrong, config.certainty or certainty)
    return [sure_from(of_class, *limits) for of_class in counts]


def open_teacher(
    config: UnlabelledConfig, ranks: distributed.RankInfo
) -> tuple[Teacher, tuple[str, ...]]:
    """Open the model on this rank's device; return how it looks, and the names of its classes."""
    shared = {field.name: getattr(config, field.name) for field in fields(ModelOptions)}
    least = LEAST if config.conf is None else min(LEAST, config.conf)
    options = PredictOptions(**shared, conf=least, thresholds="off", max_detections=MOST)
    predictor, names = open_predictor(options, ranks)
    return Teacher(predictor), names


def open_data_set(file: str, flag: str, config: UnlabelledConfig) -> DatasetSpec:
    """Read a data-set YAML that an option names."""
    try:
        return load_dataset_yaml(file, trust_links=config.trust_links)
    except UserError as error:
        error.args = (str(error).replace("--data", flag),)
        raise


def read_splits(spec: DatasetSpec) -> dict[str, list[Photo]]:
    """Return the labelled photographs of train, val and, if there is one, test."""
    splits = ("train", "val", *(split for split in ("test",) if split in spec.splits))
    return {split: read_photos(spec, split) for split in splits}


def waiting_photos(
    data: NewData,
    labelled: Mapping[str, Mapping[str, Path]],
    settings: Mapping[str, Any],
    stretch: tuple[float, float] | None,
    ranks: distributed.RankInfo,
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the name and the pixels of this rank's share of the new photographs that are not done.

    Every rank must reach this.
    """
    waiting = distributed.broadcast_from_main(
        distributed.run_on_main(lambda: data.begin(labelled, settings)) or []
    )
    if ranks.is_main and len(waiting) < len(data.new):
        print(
            f"{len(data.new) - len(waiting)} of {len(data.new)} photographs were done before",
            flush=True,
        )

    def read(name: str) -> tuple[str, Any]:
        try:
            return name, read_image(data.new[name], stretch=stretch)
        except ImageError as error:
            return name, printable(str(error), 400)

    mine = waiting[ranks.rank :: ranks.world_size]
    loaded = ordered_map(read, mine, cores_of(ranks))
    for name, photo in distributed.apart(Progress("photographs", len(mine), ranks.is_main)(loaded)):
        if isinstance(photo, str):
            data.add(name, {}, {"left_out": "not readable", "reason": photo, "found": []}, {})
        else:
            yield name, photo


def finish(
    config: UnlabelledConfig,
    data: NewData,
    spec: DatasetSpec,
    labelled: Mapping[str, Mapping[str, Path]],
    sure: Sequence[str],
) -> None:
    """Write the page and the data set's YAML; say what was done and what comes next."""
    lines, num_added = write_page(data, spec.names, sure)
    print(*lines, sep="\n")
    if config.photos and (times := data.repeat(labelled["train"], num_added)) > 1:
        longer = times + num_added / len(labelled["train"])
        print(
            f"train has each labelled photograph {times} times: {times / longer:.0%} of a "
            "training is on labels of people"
        )
        print(
            f"An epoch has {longer:.0f} times as many steps as before: for an equally long "
            "training divide --epochs by it"
        )
    data.finish(spec, [*labelled])
    print(f"Results in {data.folder}: dataset.yaml, {PAGE} (look at it)")
    if not num_added:
        print("Next: label more photographs, or name others with --photos: none was added")
        return
    run = Path(config.model).parent
    start = read_config(run).get("model")
    more = ["--config", run / CONFIG_FILE] if start else []
    start = start if config.photos else config.model
    more += ["--model", start] if start else []
    more += ["--save-dir", f"models/{data.folder.resolve().name}"]
    print(
        next_command("python", "train_yolo_ddp.py", "--data", data.folder / "dataset.yaml", *more)
    )


def look_at_val(
    teacher: Teacher,
    photos: Sequence[Photo],
    names: Sequence[str],
    ranks: distributed.RankInfo,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers of `count_at_levels` of detections on which both views agree, and the
    photographs' features.

    The ranks share the photographs. Every rank must reach this.
    """
    rows, features = [np.zeros((0, 3))], []
    stretch = trained_stretch(teacher.predictor.model)
    mine = range(ranks.rank, len(photos), ranks.world_size)
    for position in distributed.apart(
        Progress("validation photographs", len(mine), ranks.is_main)(mine)
    ):
        photo = read_image(photos[position].file, stretch=stretch)
        found, agrees = teacher.see(photo)
        is_right, is_judged = teacher.judge(found, photos[position], photo.shape[1::-1])
        each = np.column_stack([found.class_ids, is_right, found.detections.scores.numpy()])
        rows.append(each[agrees & is_judged])
        features.append(np.append(position, np.array(found.features)))
    parts = distributed.gather_arrays(
        {"rows": np.concatenate(rows), "features": np.array(features)}
    )
    every = np.concatenate([part["features"] for part in parts if len(part["features"])])
    columns = np.concatenate([part["rows"] for part in parts]).T
    return count_at_levels(len(names), *columns), every[np.argsort(every[:, 0]), 1:]


def look_at(
    photo: np.ndarray,
    teacher: Teacher,
    judged: np.ndarray,
    levels: Sequence[float | None],
    people: Photo | None = None,
    numbers: Sequence[int] | np.ndarray = (),
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a photograph's labels and regions to ignore, and a note.

    It is left out if it is as far from the judged ones, features (n, 5 + 32), as at most one in
    twenty. people: labels of the classes `numbers`: what the model sees of these classes, or where
    an object has such a label, is nothing.
    """
    (found, agrees), size = teacher.see(photo), np.array(photo.shape[1::-1])
    outlines: dict[str, Any] = {"labels": [], "ignore": []}
    note: dict[str, Any] = {"left_out": "", "found": []}
    if len(judged) >= FEWEST_GROUPS:
        furthest = np.abs(deviations(np.vstack([judged, np.array(found.features)]))).max(axis=1)
        is_far = (furthest >= furthest[-1]).mean() <= MOST_FALSE_ALARMS
        note["left_out"] = "looks like no labelled photograph" if is_far else ""
    is_added = ~np.isin(found.class_ids, numbers)
    if people:
        overlap = teacher.overlap(found, people, photo.shape[1::-1])
        is_added &= overlap.max(axis=0, initial=0) < IOU_THRESHOLDS[0]
    scores = found.detections.scores.tolist()
    for number in np.flatnonzero(is_added).tolist():
        class_id, score = int(found.class_ids[number]), scores[number]
        level = levels[class_id]
        unsure = (
            NO_BOUND
            if level is None
            else UNSURE
            if score < level
            else ""
            if agrees[number]
            else DISAGREES
        )
        outlines["ignore" if unsure else "labels"].append(
            (class_id, teacher.outline(found, number) / size)
        )
        x1, y1, x2, y2 = found.boxes[number].tolist()
        is_thin, area = (
            class_id in teacher.thin,
            float(found.masks[number].mask.sum() / size.prod()),
        )
        sizes = {
            "length_px": np.hypot(x2 - x1, y2 - y1) if is_thin else 0.0,
            "area": 0.0 if is_thin else area,
        }
        note["found"].append({"class": class_id, "score": score, "why": unsure or LABEL, **sizes})
    # A row in both files is a rough outline: of an object that a model drew only the class is
    # learned, of a wire all. Where people labelled other classes, no label of people teaches the
    # boxes and masks of this one, so all is learned.
    if people is None:
        outlines["ignore"] += [row for row in outlines["labels"] if row[0] not in teacher.thin]
    if not outlines["labels"]:  # it would teach background alone
        note["left_out"] = note["left_out"] or "no object is sure"
    return outlines, note


if __name__ == "__main__":
    run_script(main)
