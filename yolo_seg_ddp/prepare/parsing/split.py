"""Assigns photographs to train or val and gives their files names."""

import hashlib
import re
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from datetime import datetime

from yolo_seg_ddp.prepare.parsing.sources import Photograph
from yolo_seg_ddp.utils.errors import UserError
from yolo_seg_ddp.utils.text import counted

TRAIN, VAL, TEST = "train", "val", "test"
SPLITS = (TRAIN, VAL, TEST)  # the last only if the input has a folder for it
_SPLIT_FOLDER = re.compile(
    r"(train|val|test|training|valid|validation|testing)([-_ ]?(set|images?|\d{4}))?"
)
AUTO, FOLDERS, HASH, CIRCUIT, TIME = "auto", "folders", "hash", "circuit", "time"
SPLIT_BY_CHOICES = (AUTO, FOLDERS, HASH, CIRCUIT, TIME)
# photographs, and the part of them by which the number in val may miss its share
FEW, MOST_OFF = 500, 0.05
TIME_GAP_S = 30.0  # longest pause inside a series of photographs


def assign_splits(
    photographs: Iterable[Photograph],
    split_by: str,
    val_fraction: float,
    together: Iterable[Sequence[str]] = (),
) -> dict[str, str]:
    """Return `train` or `val` for each photograph's key, the same in every run and on every
    machine.

    together: lists of keys; the photographs of a list get the same split. Lists with a common
    photograph form one group. `hash`: a hash of the group's first file name decides, so that
    further photographs move none. Exceptions: a group that is larger than the smaller split goes to
    the larger one. If fewer than FEW photographs miss the share by more than MOST_OFF, groups move
    until the count is the nearest one. If a split is empty, the smallest group with the smallest
    hash moves there. If all photographs are one group, each photograph counts alone.
    `circuit`: whole circuits, because photographs of a circuit show the same poles. Circuits with a
    common picture form one group; if all circuits then form one group, `together` is ignored.
    `time`: whole groups. Raises UserError for one group. `folders`: the input's folders decide, or
    the subsets that the labels name: see `split_of`. Photographs outside of them are for training.
    Without val, test is val. `together` is ignored.
    """
    chosen = list(photographs)
    if split_by == FOLDERS:
        splits = {photograph.key: split_of(photograph) or TRAIN for photograph in chosen}
        test = TEST if VAL in splits.values() else VAL
        return {key: test if split == TEST else split for key, split in splits.items()}
    circuits = {photograph.key: photograph.circuit for photograph in chosen}
    names = first = _first_of_group(
        circuits, [*together, *(listed_by(circuits) if split_by == CIRCUIT else [])]
    )
    if split_by == CIRCUIT:
        is_one_group = len(set(first.values())) == 1
        names = circuits if is_one_group else {key: circuits[one] for key, one in first.items()}
    sizes = Counter(names.values())
    if split_by == HASH:
        if len(sizes) == 1:
            names, sizes = dict(zip(circuits, circuits, strict=True)), Counter(circuits.keys())
        held_out = _hashed(sizes, val_fraction)
    elif len(sizes) >= 2:
        held_out = _filled(sizes, val_fraction)
    elif split_by == TIME:
        raise UserError(
            "--split-by time: no pause between the photographs is long enough; use a smaller "
            "--time-gap"
        )
    else:
        listed = ", ".join(sorted(set(circuits.values()))) or "none"
        raise UserError(
            f"--split-by circuit needs photographs of two circuits, here are {listed}; use "
            "--split-by hash"
        )
    return {key: VAL if name in held_out else TRAIN for key, name in names.items()}


def choose_split(photographs: Iterable[Photograph], split_by: str) -> tuple[str, str]:
    """Return what `auto` means, and a line about it: `folders` if the input keeps photographs for
    val or test; else `hash`.

    Raises UserError if `folders` leave train or val empty.
    """
    if split_by not in (AUTO, FOLDERS):
        return split_by, ""
    numbers = Counter(map(split_of, photographs))
    has_train, has_others = bool(numbers[TRAIN] or numbers[""]), bool(numbers[VAL] or numbers[TEST])
    if not (has_train and has_others):
        if split_by == FOLDERS or (numbers[VAL] and numbers[TEST]):
            named = " and ".join(sorted(filter(None, +numbers)))
            reason = (
                f"only for {named}: train or val would be empty"
                if named
                else "for none of train, val and test"
            )
            raise UserError(f"the folders of the photographs are {reason}; use --split-by hash")
        return HASH, ""
    lines = ["the input has no val: its test is val"] * bool(numbers[TEST] and not numbers[VAL])
    if numbers[""]:
        lines.append(
            f"{counted(numbers[''], 'photograph')} outside of folders for train, val and test: "
            "for training"
        )
    return FOLDERS, "; ".join(lines)


def split_of(photograph: Photograph) -> str:
    """Return the split of the last folder in a photograph's path that names one, else of its
    subset; empty without any.
    """
    return split_of_path(photograph.source) or split_of_folder(photograph.subset)


def split_of_path(source: str) -> str:
    """Return the split of the last folder in a path that names one; empty without any."""
    return next(filter(None, map(split_of_folder, reversed(source.split("/")[:-1]))), "")


def split_of_folder(name: str) -> str:
    """Return the split that the name of a folder or subset stands for, such as `Testing` or
    `val2017`; empty for another name.
    """
    match = _SPLIT_FOLDER.fullmatch(name.lower())
    return (VAL if match[1][:3] == VAL else match[1].removesuffix("ing")) if match else ""


def bursts(times: Mapping[str, datetime], gap_s: float) -> list[list[str]]:
    """Return the keys of photographs in groups without a pause of more than `gap_s` seconds."""
    groups: list[list[str]] = []
    last = datetime.min
    for time, key in sorted((time, key) for key, time in times.items()):
        if not groups or (time - last).total_seconds() > gap_s:
            groups.append([])
        groups[-1].append(key)
        last = time
    return groups


def output_stems(photographs: Iterable[Photograph]) -> dict[str, str]:
    """Return a safe file name without suffix for each photograph's key,
    unique also without case.
    """
    chosen = list(photographs)
    stems = {photograph.key: _safe(_stem(photograph.name)) for photograph in chosen}
    shared = Counter(stem.lower() for stem in stems.values())
    return {
        # `a.jpg` beside `a.png`
        key: stem if shared[stem.lower()] == 1 else f"{stem}-{_digest(key)[:8]}"
        for key, stem in stems.items()
    }


def listed_by(names: Mapping[str, Hashable]) -> list[list[str]]:
    """Return a list of keys for each name."""
    keys: dict[Hashable, list[str]] = {}
    for key, name in names.items():
        keys.setdefault(name, []).append(key)
    return list(keys.values())


def _first_of_group(keys: Iterable[str], together: Iterable[Sequence[str]]) -> dict[str, str]:
    """Return for each key the first key of its group, in alphabetical order."""
    from scipy.cluster.hierarchy import DisjointSet  # takes 0.2 s

    groups = DisjointSet(keys)
    for one, *others in together:
        for other in others:
            groups.merge(one, other)
    first = dict.fromkeys(groups, "")  # in the order of the keys
    for group in groups.subsets():
        first |= dict.fromkeys(group, min(group))
    return first


def _hashed(sizes: Counter[str], val_fraction: float) -> set[str]:
    """Return the groups for val: those whose hash is below the share. Groups that are added later
    change nothing.

    If few photographs miss the share by more than MOST_OFF, groups of the nearest hashes change
    sides.
    """
    hashes, total = {name: _unit_hash(_stem(name)) for name in sizes}, sizes.total()
    most = min(val_fraction, 1 - val_fraction) * total  # photographs of the smaller side
    # others go to the larger side
    movable = {name for name, size in sizes.items() if size <= max(most, 1)}
    held_out = {name for name in sizes if (hashes[name] if name in movable else 0.5) < val_fraction}

    off = sum(sizes[name] for name in held_out) - val_fraction * total
    if total < FEW and abs(off) > MOST_OFF * total:
        for name in sorted(movable, key=lambda name: (abs(hashes[name] - val_fraction), name)):
            change = -sizes[name] if name in held_out else sizes[name]
            if abs(off + change) < abs(off):
                held_out ^= {name}
                off += change

    if len(sizes) >= 2 and len(held_out) in (0, len(sizes)):
        held_out ^= {min(hashes, key=lambda name: (sizes[name], hashes[name], name))}
    return held_out


def _filled(sizes: Counter[str], val_fraction: float) -> set[str]:
    """Return the groups for val: in the order of their hashes, each that brings the share nearer to
    `val_fraction`.
    """
    target = val_fraction * sizes.total()
    ordered = sorted(sizes, key=lambda name: (_unit_hash(name), name))
    held_out: set[str] = set()
    taken = 0
    for name in ordered:
        if (
            abs(taken + sizes[name] - target) < abs(taken - target)
            and len(held_out) < len(sizes) - 1
        ):
            held_out.add(name)
            taken += sizes[name]
    return held_out or {min(ordered, key=lambda name: sizes[name])}


def _stem(name: str) -> str:
    return name.rpartition(".")[0]


def _safe(stem: str) -> str:
    """Replace all but letters, digits and ` _-+().`: other characters are special to a shell or a
    file system.
    """
    safe = re.sub(r"[^\w \-+().]", "_", stem.encode("utf-8", "replace").decode())[:120]
    # file systems allow 255 bytes, including the suffix
    safe = safe.encode()[:200].decode(errors="ignore").strip(" .")
    return safe or "photograph"


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=8).hexdigest()


def _unit_hash(text: str) -> float:
    return int(_digest(text), 16) / 2**64
