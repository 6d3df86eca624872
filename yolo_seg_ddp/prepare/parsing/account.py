"""The account of a parse: for each class the objects in the source, those written, and why the
others were left out.

Each reader counts the objects when it reads a file first, before any rule acts:
`AnnotationRow.counts` and `LabelFile.lost`. For each class, source = written + left out.
"""

import re
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from yolo_seg_ddp.prepare.parsing.label_csv import ClassTable
from yolo_seg_ddp.prepare.parsing.manifest import dataset_yaml_text, list_counts
from yolo_seg_ddp.prepare.parsing.photograph import UNKNOWN_CLASS, UNUSABLE_OBJECT
from yolo_seg_ddp.prepare.parsing.reading import Labelled
from yolo_seg_ddp.prepare.parsing.rows import (
    BOX,
    IGNORED,
    NO_OBJECT,
    NO_OBJECTS,
    POLYLINE,
    Lost,
    is_ignored,
    lost_for,
)
from yolo_seg_ddp.prepare.parsing.sources import UNREAD_FILE
from yolo_seg_ddp.prepare.parsing.split import FOLDERS, TRAIN, VAL, split_of_path
from yolo_seg_ddp.prepare.parsing.state import Entry
from yolo_seg_ddp.utils.errors import printable
from yolo_seg_ddp.utils.text import counted, format_table

UNREAD, MERGED = "photograph or row that cannot be read", "part or copy of another object"
MAX_LINES, MAX_CHARACTERS = 12, 24  # of the table, and of a name in it
MAX_NAMES = 8  # that a line about something odd lists
SIZE_PX = 640  # longer side of the network's input: the trainer's default
MIN_NUMBERED = 3  # classes that differ only by a number at their end
_NUMBER, _END = (
    re.compile(r"\d+|class_\d+|colour_[0-9a-f]{6}"),
    re.compile(r"(?<=[^\d_ ])[-_ ]?\d+$"),
)


def make_account(
    entries: Sequence[Entry], labels: Labelled, class_names: Sequence[str], given: str
) -> dict[str, dict[str, Any]]:
    """Return for each class, and each label that is none, where its name stands, its objects by
    kind of shape (`source`), those written and those left out by reason, and its photographs.
    given: where the names stand of classes that no file names.
    """
    table = ClassTable(class_names)

    def name_of(label: str) -> str:
        number = table.find(label) if label else None
        return label if number is None else table.names[number]

    unread = labels.rows.keys() - {entry.key for entry in entries}
    of_unread = (lost_for(row.counts, UNREAD) for key in unread for row in labels.rows[key])
    lost: Lost = sum(of_unread, Counter(labels.lost))
    account = {name: _empty(given) for name in class_names}

    def of(label: str) -> dict[str, Any]:
        return account.setdefault(name_of(label), _empty("-"))

    for label, kind, reason in sorted(lost):
        of(label)["source"][kind] += lost[label, kind, reason]
        of(label)["left_out"][reason] += lost[label, kind, reason]
    for entry in entries:
        for label, kind, number in entry.found:
            of(label)["source"][kind] += number
            if label in NO_OBJECTS:
                of(label)["left_out"][NO_OBJECT] += number
            if is_ignored(label):
                of(label)["left_out"][IGNORED] += number
            of(label)["from"] = labels.origins.get(label, "value" if label else "-")  # EPRI's key
        for name, number in entry.objects.items():
            of(name)["written"] += number
            of(name)["photographs"] += 1
        reasons = {
            UNUSABLE_OBJECT: entry.lost,
            UNKNOWN_CLASS: entry.unknown_values,
            MERGED: entry.merged,
        }
        reasons[IGNORED] = {name: number for name, number in entry.ignored.items() if name}
        for reason, numbers in reasons.items():
            for label, number in numbers.items():
                of(label)["left_out"][reason] += number
    for label, origin in labels.origins.items():
        if name_of(label) in account:
            of(label)["from"] = origin
    for counts in account.values():
        counts["source"], counts["left_out"] = (
            dict(sorted(counts[key].items())) for key in ("source", "left_out")
        )
    return account


def _empty(origin: str) -> dict[str, Any]:
    return {
        "from": origin,
        "source": Counter(),
        "written": 0,
        "left_out": Counter(),
        "photographs": 0,
    }


def account_lines(
    manifest: Mapping[str, Any],
    sizes: Mapping[str, str],
    line_width_px: float,
    rectangles: Sequence[str] = (),
) -> list[str]:
    """Return the table of at most MAX_LINES lines, a line with the remedy for each thing that is
    odd, and files not read.

    sizes: of the objects of each class, as text. rectangles: see `rectangular_classes`.
    """
    account, written_in = manifest["account"], manifest["counts"]["objects"]
    splits = [split for split in manifest["counts"]["photographs"] if split != TRAIN]
    looked_for = manifest["counts"].get("looked_for", {})
    odd = _odd(manifest, rectangles)
    rows = []
    for name, counts in account.items():
        marks = "".join(f"  ! {mark}" for mark, (names, _) in odd.items() if name in names)
        strip = {POLYLINE: f"{POLYLINE} as a strip of {line_width_px:g} px"}
        kinds = [f"{number:,} {strip.get(kind, kind)}" for kind, number in counts["source"].items()]
        # the number is in `source`
        kinds = kinds if len(kinds) > 1 else [kind.partition(" ")[2] for kind in kinds]
        held_out = [written_in[name][split] if name in written_in else 0 for split in splits]
        numbers = [
            sum(counts["source"].values()),
            counts["written"],
            *held_out,
            counts["photographs"],
            *([sum(looked_for.get(name, {}).values())] if looked_for else []),
        ]
        words = [(name or "(no class)")[:MAX_CHARACTERS], counts["from"][:MAX_CHARACTERS]]
        rows.append([*words, *numbers, sizes.get(name, "-"), (", ".join(kinds) + marks).strip()])
    fits = len(rows) <= MAX_LINES - 2
    shown = rows if fits else rows[: MAX_LINES - 3]
    head = [
        "class",
        "named by",
        "source",
        "written",
        *splits,
        "photos",
        *(["looked for in"] if looked_for else []),
        f"size at {SIZE_PX} px",
        "drawn as",
    ]
    lines = format_table(head, shown).splitlines()
    if not fits:
        rest = rows[len(shown) :]
        sums = (
            f"{counted(sum(row[2] for row in rest), 'object')} in the source, "
            f"{sum(row[3] for row in rest):,} written"
        )
        lines.append(f"… and {counted(len(rest), 'more class')}: {sums}; all in manifest.json")
    reasons: Counter[str] = sum(
        (Counter(counts["left_out"]) for counts in account.values()), Counter()
    )
    if reasons:
        objects = counted(reasons.total(), "object")
        lines.append(f"in the source and not written: {objects}: {list_counts(reasons)}")
    for mark, (names, remedy) in odd.items():
        most = names[:MAX_NAMES]
        more = f" and {len(names) - len(most)} more" if len(names) > len(most) else ""
        lines.append(f"! {mark}: {printable(', '.join(most), 200)}{more}: {remedy}")
    return lines + [
        f"{item['place']}: {item['text']}"
        for item in manifest["problems"]
        if item["kind"] == UNREAD_FILE
    ]


def _odd(
    manifest: Mapping[str, Any], rectangles: Sequence[str]
) -> dict[str, tuple[list[str], str]]:
    """Return what is odd: for each mark the classes, or folders, and the remedy."""
    account, classes = manifest["account"], manifest["classes"]
    used = [name for name in classes if account[name]["written"]]
    ways = {photograph["source"]: photograph["split"] for photograph in manifest["photographs"]}
    by_folders = manifest["options"]["split_by"] == FOLDERS
    other = {} if by_folders else {source: split_of_path(source) for source in ways}
    named = [
        name
        for name, counts in account.items()
        if name in classes or UNKNOWN_CLASS in counts["left_out"]
    ]
    boxes = {
        name: account[name]["source"][BOX] for name in named if BOX in account[name]["source"]
    } | {name: account[name]["written"] for name in manifest["options"].get("boxes", ())}
    num_boxes = sum(boxes.values())
    stems = Counter(_END.sub("", name) for name in named)
    numbers = [name for name in named if _NUMBER.fullmatch(name)]
    line = dataset_yaml_text(manifest).splitlines().index("names:") + 2
    here = "".join(
        f"; until the next parse in dataset.yaml:{line + classes.index(one)}"
        for one in numbers[:1]
        if one in classes
    )
    few = "label more photographs with it, else it is either learned or judged"
    others = (
        f"--classes {shlex.join(used)}"
        if len(used) <= MAX_NAMES
        else "--classes with the names of the others"
    )
    odd = {
        "no object": ([name for name in classes if name not in used], f"leave it out: {others}"),
        "in 1 photograph": (
            [name for name in used if account[name]["photographs"] == 1 < len(ways)],
            few,
        ),
        "a number as a name": (
            numbers,
            f"name {' '.join(numbers[:1])} in your tool; for masks in classes.txt, one name a "
            f"line from value 0 on{here}",
        ),
        "differs only by a number": (
            [
                name
                for name in named
                if stems[_END.sub("", name)] >= MIN_NUMBERED and not _NUMBER.fullmatch(name)
            ],
            "if the number counts objects and names no class, leave it out of the labels in your "
            "tool",
        ),
        "none of the classes": (
            [name for name in named if name not in classes],
            "add it to --classes, or ignore this",
        ),
        "boxes": (
            [*boxes],
            f"{counted(num_boxes, 'object')} ha{'s' if num_boxes == 1 else 've'} a box and no "
            "outline, which teaches class and box, and little of the mask",
        ),
        "upright rectangles": (
            [*rectangles],
            "these outlines teach rectangular masks; if they are boxes around other shapes, add "
            f"--boxes {shlex.join([*rectangles][:MAX_NAMES])}",
        ),
        "folder not used as a split": (
            sorted({split for source, split in other.items() if split not in ("", ways[source])}),
            f"photographs of it are in another split; move all into folders {TRAIN} and {VAL}, or "
            "leave it so",
        ),
    }
    return {mark: (names, remedy) for mark, (names, remedy) in odd.items() if names}
