"""Add photographs without labels to a data set: a trained model labels what it surely sees; what it is unsure of is ignored.

    python -m extras.unlabelled --model m/best.pt --labelled data/mine/dataset.yaml --photos flights/ --output data/more

Then train on data/more/dataset.yaml. Started with torchrun, the ranks share the photographs. A killed command continues:
extras/unlabelled/README.md.
"""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from extras.unlabelled.bounds import LEAST, Judged
from extras.unlabelled.folder import NewData, free_names, refuse_foreign
from extras.unlabelled.labelled import Originals, looks_unlike
from extras.unlabelled.page import LIST, PAGE, write_pages
from extras.unlabelled.teacher import Teacher
from utils import distributed
from utils.common.config import option, parse_config
from utils.common.errors import UserError, print_warning, printable, run_script
from utils.common.files import claimed_output
from utils.common.progress import Progress
from utils.common.signals import die_with_parent
from utils.common.text import counted, next_command
from utils.common.threads import ordered_map
from utils.data.dataset_yaml import TRUST_LINKS_HELP, DatasetSpec, list_photos, load_dataset_yaml
from utils.data.images import ImageError, Stretch, read_image
from utils.data.labels import Photo, read_photos
from utils.distributed import cleanup_ddp, setup_ddp
from utils.predict.options import ModelOptions, PredictOptions, cores_of, open_predictor
from utils.predict.thresholds import digest_of_model, settings_of
from utils.predict.tiles import LONGEST_WAIT_S
from utils.run.records import CONFIG_FILE, read_config
from utils.yolo.model import require_classes, trained_stretch


@dataclass(frozen=True)
class UnlabelledConfig(ModelOptions):
    """Options of `python -m extras.unlabelled`."""

    labelled: str = option(None, "YAML of the labelled data set, with train and val", required=True, metavar="FILE")
    photos: str = option(None, "photographs without labels: folder, quoted pattern or .txt file", required=True)
    output: str = option(None, "folder for the new data set", required=True, metavar="DIR")
    wrong: float = option(0.05, "largest share of wrong labels of each class", above=0, below=1)
    certainty: float = option(0.9, "certainty with which it is not exceeded", above=0, below=1)
    batch_size: int = option(8, "views of a photograph per forward pass", at_least=1)
    trust_links: bool = option(False, TRUST_LINKS_HELP)


def main(argv: Sequence[str] | None = None) -> int:
    """Write the data set; return the exit code."""
    cv2.setNumThreads(0)
    config = parse_config(UnlabelledConfig, __doc__, argv)
    die_with_parent()
    ranks = distributed.read_rank_environment()
    with claimed_output(config.output) as folder:
        spec = load_dataset_yaml(config.labelled, trust_links=config.trust_links)
        refuse_foreign(folder, spec)
        labelled = {
            split: read_photos(spec, split) for split in ("train", "val", *(["test"] * ("test" in spec.splits)))
        }
        photos = new_photos(config.photos, folder)
        shared = {field.name: getattr(config, field.name) for field in fields(ModelOptions)}
        how = PredictOptions(**shared, conf=LEAST, thresholds="off", batch_size=config.batch_size)
        predictor, names = open_predictor(how, ranks)
        require_classes(config.model, predictor.model, config.labelled, spec.names)
        os.environ.setdefault("NCCL_TIMEOUT", LONGEST_WAIT_S)
        setup_ddp(predictor.device, ranks)
        teacher, stretch = Teacher(predictor, predictor.model), trained_stretch(predictor.model)
        files = {split: free_names([photo.file for photo in of]) for split, of in labelled.items()}
        try:
            originals = Originals([(split, photo.file) for split, of in labelled.items() for photo in of])
            rows, judged = look_at_val(teacher, labelled["val"], spec.stretch, ranks)
        except ImageError as error:
            raise UserError(f"{error}; check_data.py finds all such photographs") from error
        found = [
            Judged.of(rows[rows[:, 0] == number, 1], rows[rows[:, 0] == number, 2] == 0) for number in range(len(names))
        ]
        sure = [each.sure(config.wrong, config.certainty) for each in found]
        levels = [level for level, _ in sure]
        facts = [
            digest_of_model(config.model),
            settings_of(predictor, names),
            LEAST,
            levels,
            sorted(map(bytes.hex, originals.digests)),
        ]
        data = NewData(folder, files, free_names(photos, files["train"]), facts)
        distributed.run_on_main(data.begin)
        waiting = [name for name in data.new if not data.is_done(name)]
        if ranks.is_main:
            lines = [f"{name}: {words}" for name, (_, words) in zip(names, sure, strict=True)]
            done = len(data.new) - len(waiting)
            print(
                *lines,
                *([f"{counted(done, 'photograph')} done by an earlier run"] if done else []),
                sep="\n",
                flush=True,
            )
        distributed.barrier()
        mine = waiting[ranks.rank :: ranks.world_size]
        loaded = ordered_map(lambda name: (name, read(data.new[name], stretch)), mine, min(cores_of(ranks), 2))
        for name, photo in Progress("photographs", len(mine), ranks.is_main)(loaded):
            label(data, name, photo, teacher, originals, judged, levels)
        distributed.barrier()
        distributed.run_on_main(lambda: finish(config, spec, data, sure))
        cleanup_ddp()
    return 0


def new_photos(source: str, output: Path) -> list[Path]:
    """Return the photographs without labels. Raises UserError if there are none."""
    try:
        return [file for file in list_photos(source) if not file.resolve().is_relative_to(output.resolve())]
    except UserError as error:
        raise UserError(str(error).replace("--source", "--photos")) from error


def read(file: Path, stretch: Stretch | None) -> np.ndarray | ImageError:
    """Return a photograph, or why it cannot be read."""
    try:
        return read_image(file, stretch=stretch)
    except ImageError as error:
        return error


def look_at_val(
    teacher: Teacher, photos: Sequence[Photo], stretch: Stretch | None, ranks: distributed.RankInfo
) -> tuple[np.ndarray, np.ndarray]:
    """Return the detections on which both views agree, class, confidence and whether it is right (n, 3), and each photograph's traits.

    The ranks share the photographs. Every rank must reach this.
    """
    rows: list[np.ndarray] = [np.zeros((0, 3))]
    traits: list[np.ndarray] = []
    mine = range(ranks.rank, len(photos), ranks.world_size)
    for position in Progress("validation photographs", len(mine), ranks.is_main)(mine):
        photo = read_image(photos[position].file, stretch=stretch)
        found, agrees = teacher.see(photo)
        is_right, is_judged = teacher.judge(found, photos[position], photo.shape[1::-1])
        each = np.column_stack([found.class_ids, found.detections.scores.numpy(), is_right])
        rows.append(each[agrees & is_judged])
        traits.append(np.append(position, found.traits))
    parts = distributed.gather_arrays({"rows": np.concatenate(rows), "traits": np.array(traits)})
    every = np.concatenate([part["traits"] for part in parts if len(part["traits"])])
    return np.concatenate([part["rows"] for part in parts]), every[np.argsort(every[:, 0]), 1:]


def label(
    data: NewData,
    name: str,
    photo: np.ndarray | ImageError,
    teacher: Teacher,
    originals: Originals,
    judged: np.ndarray,
    levels: Sequence[float | None],
) -> None:
    """Write a photograph with what is surely seen in it, and what is unsure; or note why it is left out."""
    if isinstance(photo, ImageError):
        data.add(name, [], [], {"left_out": "not readable", "why": printable(str(photo), 400), "found": []})
        return
    if original := originals.shown_by(data.new[name], photo):
        data.add(name, [], [], {"left_out": "shows a labelled photograph", "why": original, "found": []})
        return
    found, agrees = teacher.see(photo)
    size = np.array(photo.shape[1::-1])
    outlines: dict[bool, list[tuple[int, np.ndarray]]] = {True: [], False: []}
    facts: list[dict[str, Any]] = []
    for number, (class_id, score) in enumerate(
        zip(found.class_ids.tolist(), found.detections.scores.tolist(), strict=True)
    ):
        level = levels[class_id]
        why = "" if agrees[number] else "the mirrored view disagrees"
        why = "class without a bound" if level is None else why or "unsure" * (score < level)
        outlines[not why].append((class_id, teacher.outline(found, number) / size))
        x1, y1, x2, y2 = found.boxes[number].tolist()
        length = float(np.hypot(x2 - x1, y2 - y1)) if class_id in teacher.thin else 0.0
        area = 0.0 if length else float(found.masks[number].mask.sum() / size.prod())
        facts.append(
            {
                "class": class_id,
                "score": round(score, 4),
                "why": why,
                "length_px": round(length, 1),
                "area": round(area, 6),
            }
        )
    unlike = "looks like no labelled photograph" if looks_unlike(found.traits, judged) else ""
    data.add(name, outlines[True], outlines[False], {"left_out": unlike, "why": "", "found": facts})


def finish(
    config: UnlabelledConfig, spec: DatasetSpec, data: NewData, sure: Sequence[tuple[float | None, str]]
) -> None:
    """Write the data set's YAML, the page and the list; say what was done and what comes next."""
    left_out: Counter[str] = Counter()
    num_labels = num_ignored = 0
    for _, note in data.all_notes():
        left_out[note["left_out"]] += 1
        kinds = [bool(each["why"]) for each in note["found"] if not note["left_out"]]
        num_ignored += sum(kinds)
        num_labels += len(kinds) - sum(kinds)
    taken = left_out.pop("", 0)
    write_pages(data, spec.names, sure)
    file = data.finish(spec)
    what = f"{counted(num_labels, 'label')} and {counted(num_ignored, 'region')} to ignore"
    print(
        ", ".join(
            [
                f"{counted(taken, 'photograph')} added with {what}",
                *(f"{n} left out: {why}" for why, n in left_out.items()),
            ]
        )
    )
    print(f"Results in {config.output}: {file.name}, {PAGE} (look at it), {LIST} (what to label next)")
    if not num_labels:
        print_warning(
            "nothing is sure, so the new photographs teach background alone: see --wrong, or label some of them"
        )
    run = Path(config.model).parent
    start = read_config(run).get("model")
    options = ["--config", str(run / CONFIG_FILE), "--model", str(start)] if start else []
    more = ["--save-dir", f"models/{Path(config.output).resolve().name}"]
    print(next_command("python", "train_yolo_ddp.py", "--data", file, *options, *more))


if __name__ == "__main__":
    run_script(main)
