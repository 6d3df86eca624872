"""The processed data set's manifest.json and dataset.yaml, and the report that parse_labels.py
prints.
"""

import itertools
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import yaml

from yolo_seg_ddp.prepare.parsing.label_csv import UNREADABLE_ROW, Problem
from yolo_seg_ddp.prepare.parsing.rows import NO_OBJECT, UNUSED_SOURCE, digest_of
from yolo_seg_ddp.prepare.parsing.sources import (
    UNREAD_FILE,
    UNREADABLE_ARCHIVE,
    UNREADABLE_PHOTOGRAPH,
    Photograph,
)
from yolo_seg_ddp.prepare.parsing.split import FOLDERS, SPLITS, TEST, VAL
from yolo_seg_ddp.prepare.parsing.state import Entry
from yolo_seg_ddp.utils.text import counted

MANIFEST_VERSION = 1
NO_ROW = "unlisted photograph"
NO_PHOTOGRAPH = "missing photograph"
UNUSABLE_PHOTOGRAPH = "photograph without a usable object"
UNREADABLE_KINDS = (UNREADABLE_PHOTOGRAPH, UNREADABLE_ARCHIVE, UNREADABLE_ROW, UNUSABLE_PHOTOGRAPH)
MAX_ALIKE = 3  # lines of one reason; more become one line
MIN_VAL_OBJECTS = 5  # of a class; its scores say little with fewer
_WORDS = re.compile(r"(?<!\S)[a-z]+(?=[\s,;:]|$)")  # of a message, without names and numbers
_RANKS = {  # order of printing; 2 for other kinds
    **dict.fromkeys(UNREADABLE_KINDS, 0),
    # how labels were understood
    **dict.fromkeys((UNUSED_SOURCE, NO_OBJECT, "first value", "no categories"), 1),
    **dict.fromkeys((NO_ROW, NO_PHOTOGRAPH), 3),
}


def make_manifest(
    entries: Sequence[Entry],
    photographs: Mapping[str, Photograph],
    problems: Iterable[Problem],
    options: dict[str, Any],
    class_names: Sequence[str],
    copies: Sequence[Sequence[str]],
    series: Sequence[Sequence[str]] | None,
    account: dict[str, Any],
) -> dict[str, Any]:
    """Return the manifest as plain values, in an order that depends only on the data.

    copies, series: keys of the photographs that show the same, and that were taken in one series,
    or None. account: see account.py.
    """
    files = {entry.key: f"{entry.stem}.jpg" for entry in entries}
    records = [_record(entry, photographs[entry.key]) for entry in entries]
    listed = sorted(set(problems), key=_problem_order)
    read = [
        [record["split"], record["file"], record["digest"], record["label_digest"]]
        for record in records
    ]
    return {
        "version": MANIFEST_VERSION,
        # of what training reads
        "fingerprint": digest_of(json.dumps([list(class_names), read]).encode()).hex(),
        "classes": list(class_names),
        "options": options,
        "counts": _counts(entries, photographs, class_names),
        "account": account,
        "skipped": dict(sorted(Counter(problem.kind for problem in listed).items())),
        "unknown_values": dict(
            sorted(sum((Counter(entry.unknown_values) for entry in entries), Counter()).items())
        ),
        "copies": [[files[key] for key in group] for group in copies],
        **(
            {}
            if series is None
            else {"series": [[files[key] for key in group] for group in series]}
        ),
        "photographs": records,
        "problems": [
            {"place": item.place, "kind": item.kind, "text": item.text} for item in listed
        ],
    }


def dataset_yaml_text(manifest: Mapping[str, Any]) -> str:
    """Return the text of dataset.yaml.

    Its paths are relative to its folder, so the folder can be moved.
    """
    options = ", ".join(f"{name} {value}" for name, value in manifest["options"].items())
    stretch = manifest["options"].get("stretch")
    deep = (
        f"stretch: {[*stretch]}  # values of the photographs that became black and white\n"
        if stretch
        else ""
    )
    test = "test: test/images\n" if TEST in manifest["counts"]["photographs"] else ""
    names = yaml.safe_dump(
        {"names": dict(enumerate(manifest["classes"]))}, allow_unicode=True, sort_keys=False
    )
    return (
        "# Made by parse_labels.py; what was skipped and why is in manifest.json beside it.\n"
        f"# {options}\n"
        "train: train/images\n"
        f"val: val/images\n{test}"
        f"{deep}{names}"
    )


def report_lines(
    manifest: dict[str, Any], num_problems: int = 20, *, has_circuits: bool = True
) -> list[str]:
    """Return the report of a run: what was skipped, and how the photographs were split."""
    counts = manifest["counts"]
    lines = []
    # The account ends with the files that are not read.
    problems = by_severity(
        Problem(**item) for item in manifest["problems"] if item["kind"] != UNREAD_FILE
    )
    alike: dict[tuple[str, ...], list[Problem]] = {}
    for item in problems:
        alike.setdefault((item.kind, *_WORDS.findall(item.text)), []).append(item)
    if problems:
        lines.append(f"left out or mended: {list_counts(Counter(item.kind for item in problems))}")
    groups = [
        [group] if len(group) > MAX_ALIKE else [[one] for one in group] for group in alike.values()
    ]
    told = list(itertools.chain(*groups))[:num_problems]
    for first, *others in told:
        more = f" … and {len(others):,} more like this, all in manifest.json" if others else ""
        lines.append(f"  {first.place}: {first.text}{more}")
    if num_left := len(problems) - sum(map(len, told)):
        lines.append(f"  … and {num_left:,} more, all in manifest.json")
    if counts["turned_photographs"]:
        lines.append(
            "EXIF-turned photographs, by the frame of their outlines: "
            f"{list_counts(counts['turned_photographs'])}"
        )
    if has_circuits:
        lines += [
            f"{split} circuits: {list_counts(circuits)}"
            for split, circuits in counts["circuits"].items()
        ]
    if ignored := counts.get("ignored"):
        lines.append(f"regions to ignore: {list_counts(ignored)}")
    lines += _group_lines(manifest)
    looked_for = counts.get("looked_for", {})
    if unjudged := [name for name, by_split in looked_for.items() if not by_split[VAL]]:
        lines.append(
            f"val has no photograph in which somebody looked for {', '.join(unjudged)}: their "
            "scores cannot be measured; use --split-by hash, raise --val-fraction, or label them "
            "in photographs of val"
        )
    few = [
        item
        for item in counts["objects"].items()
        if item[1][VAL] < MIN_VAL_OBJECTS and any(item[1].values()) and item[0] not in unjudged
    ]
    if few:
        shown = ", ".join(
            f"{name} {by_split[VAL]} of {sum(by_split.values()):,}" for name, by_split in few
        )
        cure = "their scores say little: label more photographs with them, or raise --val-fraction"
        lines.append(f"classes with fewer than {MIN_VAL_OBJECTS} objects in val: {shown}; {cure}")
    empty = sum(counts["without_objects"].values())
    return [*lines, f"photographs: {list_counts(counts['photographs'])}; without objects {empty:,}"]


def _group_lines(manifest: dict[str, Any]) -> list[str]:
    """Return lines about photographs that must stay in one split: copies and series; none if there
    are none.
    """
    copies, series, total = manifest["copies"], manifest.get("series"), len(manifest["photographs"])
    by_folders = manifest["options"]["split_by"] == FOLDERS
    sides = " and ".join(manifest["counts"]["photographs"])
    lines = (
        [f"split: as the input's folders for {sides} say; --split-by hash makes a new one"]
        if by_folders
        else []
    )
    if copies:
        shown = (
            f"copies: {sum(map(len, copies)):,} photographs show only "
            f"{counted(len(copies), 'picture')}"
        )
        split_of = {record["file"]: record["split"] for record in manifest["photographs"]}
        num_apart = sum(len({split_of[file] for file in group}) > 1 for group in copies)
        reason = "all are alike" if len(copies[0]) == total else "every circuit shares some"
        if by_folders:
            reason = "the input's folders say so, and --split-by hash keeps each on one side"
        lines.append(
            f"{shown}; "
            + (f"{num_apart:,} in {sides}: {reason}" if num_apart else "each is on one side")
        )
    if series is not None:
        without = total - sum(map(len, series))
        unknown = f"; {without:,} without a time in EXIF, each on its own" if without else ""
        lines.append(
            f"series: {len(series):,}, the longest of "
            f"{counted(max(map(len, series)), 'photograph')}{unknown}"
        )
    return lines


def _record(entry: Entry, photograph: Photograph) -> dict[str, Any]:
    metadata = entry.facts
    return {
        "file": f"{entry.stem}.jpg",
        "source": photograph.source,
        "circuit": photograph.circuit,
        "split": entry.split,
        "width": metadata.width,
        "height": metadata.height,
        "orientation": metadata.orientation,
        "exif_frame": entry.exif_frame,
        "output_width": metadata.output_width,
        "output_height": metadata.output_height,
        "objects": dict(sorted(entry.objects.items())),
        "digest": entry.image_digest,
        "label_digest": entry.label_digest,
    }


def _counts(
    entries: Sequence[Entry], photographs: Mapping[str, Photograph], class_names: Sequence[str]
) -> dict[str, Any]:
    splits = [
        split for split in SPLITS if split != TEST or any(entry.split == TEST for entry in entries)
    ]
    by_split = {split: [entry for entry in entries if entry.split == split] for split in splits}
    objects = {
        split: sum((Counter(entry.objects) for entry in by_split[split]), Counter())
        for split in splits
    }
    circuits = {
        split: Counter(photographs[entry.key].circuit for entry in by_split[split])
        for split in splits
    }
    ignored = sum(
        (
            Counter({name or "all classes": n for name, n in entry.ignored.items()})
            for entry in entries
        ),
        Counter(),
    )
    looked_for = {
        name: {
            split: sum(name not in entry.unsearched for entry in by_split[split])
            for split in splits
        }
        for name in class_names
    }
    turned = Counter(entry.exif_frame for entry in entries if entry.facts.orientation != 1)
    return {
        "photographs": {split: len(by_split[split]) for split in splits},
        "without_objects": {
            split: sum(not entry.objects for entry in by_split[split]) for split in splits
        },
        "objects": {
            name: {split: objects[split][name] for split in splits} for name in class_names
        },
        "circuits": {split: dict(sorted(circuits[split].items())) for split in splits},
        "turned_photographs": dict(sorted(turned.items())),
        **({"ignored": dict(sorted(ignored.items()))} if ignored else {}),
        **({"looked_for": looked_for} if any(entry.unsearched for entry in entries) else {}),
    }


def by_severity(problems: Iterable[Problem]) -> list[Problem]:
    """Sort problems: unreadable inputs, others, and last those that are frequent in EPRI's data
    set.
    """
    return sorted(
        problems, key=lambda problem: (_RANKS.get(problem.kind, 2), _problem_order(problem))
    )


def _problem_order(problem: Problem) -> tuple[str, int, str, str]:
    file, _, line = problem.place.rpartition(":")
    is_line = line.isdigit()
    return (
        file if is_line else problem.place,
        int(line) if is_line else 0,
        problem.kind,
        problem.text,
    )


def list_counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counts.items()) or "none"
