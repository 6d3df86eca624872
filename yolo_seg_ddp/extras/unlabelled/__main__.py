"""Add photographs without labels to a data set: a trained model labels what it surely sees; what it
is unsure of is ignored.

    python -m yolo_seg_ddp unlabelled --model m/best.pt \\
        --labelled data/mine/dataset.yaml --photos flights/ --output data/more

Then train on data/more/dataset.yaml. Started with torchrun, the ranks share the photographs. A
killed command continues: yolo_seg_ddp/extras/unlabelled/README.md.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
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
from yolo_seg_ddp.data.labels import Photo, read_photos
from yolo_seg_ddp.extras.unlabelled.data_set import NewData, Originals, Outlines, free_names
from yolo_seg_ddp.extras.unlabelled.judging import LEAST, Teacher, sure_from
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
from yolo_seg_ddp.run.records import CONFIG_FILE, read_config
from yolo_seg_ddp.utils import distributed
from yolo_seg_ddp.utils.config import parse_config
from yolo_seg_ddp.utils.errors import UserError, printable, run_script
from yolo_seg_ddp.utils.files import claimed_output
from yolo_seg_ddp.utils.options import option
from yolo_seg_ddp.utils.progress import Progress
from yolo_seg_ddp.utils.signals import die_with_parent
from yolo_seg_ddp.utils.text import next_command
from yolo_seg_ddp.utils.threads import ordered_map
from yolo_seg_ddp.yolo.model import require_classes, trained_stretch

MOST = 1000  # detections in a photograph; what is beyond would become background


@dataclass(frozen=True)
class UnlabelledConfig(ModelOptions):
    """Options of `python -m yolo_seg_ddp unlabelled`."""

    labelled: str = option(
        None, "YAML of the labelled data set, with train and val", required=True, metavar="FILE"
    )
    photos: str = option(
        None, "photographs without labels: folder, quoted pattern or .txt file", required=True
    )
    output: str = option(None, "folder for the new data set", required=True, metavar="DIR")
    wrong: float = option(0.05, "largest share of wrong labels of a class", above=0, below=1)
    certainty: float = option(0.9, "certainty that it is not exceeded", above=0, below=1)
    keep_unlike: bool = option(False, "also add photographs that look like no labelled one")
    trust_links: bool = option(False, TRUST_LINKS_HELP)


def main(argv: Sequence[str] | None = None) -> int:
    """Write the data set; return the exit code."""
    cv2.setNumThreads(0)
    config = parse_config(UnlabelledConfig, __doc__, argv)
    die_with_parent()
    ranks = distributed.read_rank_environment()
    with claimed_output(config.output) as folder:
        try:
            spec = load_dataset_yaml(config.labelled, trust_links=config.trust_links)
            photos = list_photos(config.photos)
        except UserError as error:  # which names the flags of other commands
            error.args = (
                str(error).replace("--source", "--photos").replace("--data", "--labelled"),
            )
            raise
        splits = [
            split for split in ("train", "val", "test") if split != "test" or split in spec.splits
        ]
        labelled = {split: read_photos(spec, split) for split in splits}
        files = {split: free_names([photo.file for photo in of]) for split, of in labelled.items()}
        data = NewData(folder, free_names(photos, files["train"]))
        shared = {field.name: getattr(config, field.name) for field in fields(ModelOptions)}
        how = PredictOptions(**shared, conf=LEAST, thresholds="off", max_detections=MOST)
        predictor, names = open_predictor(how, ranks)
        require_classes(config.model, predictor.model, config.labelled, spec.names)
        distributed.setup_ddp(predictor.device, ranks)
        teacher, stretch = Teacher(predictor), trained_stretch(predictor.model)
        try:
            originals = Originals(
                [(split, photo.file) for split, of in labelled.items() for photo in of], ranks
            )
            rows, judged = look_at_val(teacher, labelled["val"], stretch, ranks)
        except ImageError as error:
            raise UserError(f"{error}; check_data.py names all such photographs") from error
        of_class = (rows[rows[:, 0] == number] for number in range(len(names)))
        sure = [
            sure_from(own[:, 1], own[:, 2] == 0, config.wrong, config.certainty) for own in of_class
        ]
        levels = [level for level, _ in sure]
        judged = judged[: 0 if config.keep_unlike else None]
        facts: dict[str, Any] = {
            "model": digest_of_model(config.model),
            "levels": levels,
            "compared": len(judged),
        }
        facts |= settings_of(predictor, names) | {
            "labelled": sorted(map(bytes.hex, originals.digests))
        }
        waiting = distributed.broadcast_from_main(
            distributed.run_on_main(lambda: data.begin(files, facts)) or []
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
        for name, photo in distributed.apart(
            Progress("photographs", len(mine), ranks.is_main)(loaded)
        ):
            if isinstance(photo, str):
                data.add(name, {}, {"left_out": "not readable", "reason": photo, "found": []})
            elif original := originals.shown_by(data.new[name], photo):
                data.add(
                    name,
                    {},
                    {"left_out": "shows a labelled photograph", "reason": original, "found": []},
                )
            else:
                data.add(name, *look_at(photo, teacher, judged, levels))
        distributed.run_on_main(
            lambda: finish(config, data, spec, files, [words for _, words in sure])
        )
        distributed.cleanup_ddp()
    return 0


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
    if (times := data.repeat(labelled["train"], num_added)) > 1:
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
    more = ["--config", run / CONFIG_FILE, "--model", start] if start else []
    more += ["--save-dir", f"models/{data.folder.resolve().name}"]
    print(
        next_command("python", "train_yolo_ddp.py", "--data", data.folder / "dataset.yaml", *more)
    )


def look_at_val(
    teacher: Teacher,
    photos: Sequence[Photo],
    stretch: tuple[float, float] | None,
    ranks: distributed.RankInfo,
) -> tuple[np.ndarray, np.ndarray]:
    """Return class, confidence and whether right of detections on which both views agree, (n, 3),
    and the photographs' features.

    The ranks share the photographs. Every rank must reach this.
    """
    rows, features = [np.zeros((0, 3))], []
    mine = range(ranks.rank, len(photos), ranks.world_size)
    for position in distributed.apart(
        Progress("validation photographs", len(mine), ranks.is_main)(mine)
    ):
        photo = read_image(photos[position].file, stretch=stretch)
        found, agrees = teacher.see(photo)
        is_right, is_judged = teacher.judge(found, photos[position], photo.shape[1::-1])
        each = np.column_stack([found.class_ids, found.detections.scores.numpy(), is_right])
        rows.append(each[agrees & is_judged])
        features.append(np.append(position, np.array(found.features)))
    parts = distributed.gather_arrays(
        {"rows": np.concatenate(rows), "features": np.array(features)}
    )
    every = np.concatenate([part["features"] for part in parts if len(part["features"])])
    return np.concatenate([part["rows"] for part in parts]), every[np.argsort(every[:, 0]), 1:]


def look_at(
    photo: np.ndarray, teacher: Teacher, judged: np.ndarray, levels: Sequence[float | None]
) -> tuple[dict[str, Outlines], dict[str, Any]]:
    """Return a photograph's labels and regions to ignore, and a note.

    It is left out if it is as far from the judged ones, features (n, 5 + 32), as at most one in
    twenty.
    """
    (found, agrees), size = teacher.see(photo), np.array(photo.shape[1::-1])
    outlines: dict[str, Any] = {"labels": [], "ignore": []}
    note: dict[str, Any] = {"left_out": "", "found": []}
    if len(judged) >= FEWEST_GROUPS:
        furthest = np.abs(deviations(np.vstack([judged, np.array(found.features)]))).max(axis=1)
        is_far = (furthest >= furthest[-1]).mean() <= MOST_FALSE_ALARMS
        note["left_out"] = "looks like no labelled photograph" if is_far else ""
    for number, score in enumerate(found.detections.scores.tolist()):
        class_id = int(found.class_ids[number])
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
    # learned, of a wire all.
    outlines["ignore"] += [row for row in outlines["labels"] if row[0] not in teacher.thin]
    if not outlines["labels"]:  # it would teach background alone
        note["left_out"] = note["left_out"] or "no object is sure"
    return outlines, note


if __name__ == "__main__":
    run_script(main)
