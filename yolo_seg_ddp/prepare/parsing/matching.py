"""Finds the photograph that a name in a label file means.

Names are only compared with photographs, never opened.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from yolo_seg_ddp.prepare.parsing.sources import Photograph
from yolo_seg_ddp.utils.errors import printable

# Label Studio puts it before the name of an uploaded file
_UPLOAD_PREFIX = re.compile(r"^[0-9a-f]{6,12}-")


@dataclass(frozen=True)
class Match:
    """The key of the photograph that a name means, or the reason why there is none.

    `note`: how name and photograph differ.
    """

    key: str | None
    reason: str = ""
    is_exact: bool = True
    note: str = ""


def match_names(wanted: Iterable[Sequence[str]], photographs: Iterable[str]) -> list[Match]:
    """Return a match for each list of alternative names: the photograph of that file name with the
    most equal folders.

    If folders or the extension differ, the match counts only if no other name has the same
    photograph. Case does not matter.
    """
    by_name: dict[str, list[str]] = defaultdict(list)
    by_upload: dict[str, list[str]] = defaultdict(list)
    by_stem: dict[str, list[str]] = defaultdict(list)
    for key in photographs:
        name = PurePosixPath(key).name
        by_name[name].append(key)
        by_upload[_as_uploaded(name)].append(key)
        by_stem[PurePosixPath(name).stem].append(key)
    names = [tuple(alternatives) for alternatives in wanted]
    matches = [_match(alternatives, by_name, by_upload) for alternatives in names]
    pairs = zip(names, matches, strict=True)
    matches = [
        match if match.key else _with_other_extension(match, names, by_stem)
        for names, match in pairs
    ]
    claims: dict[str | None, set[tuple[str, ...] | None]] = defaultdict(set)
    for alternatives, match in zip(names, matches, strict=True):
        claims[match.key].add(None if match.is_exact else alternatives)
    disputed = Match(
        None,
        "other names fit the only photograph of this name; put the photographs into the folders "
        "of the names",
    )
    return [
        match if match.is_exact or len(claims[match.key]) == 1 else disputed for match in matches
    ]


def _match(
    alternatives: Sequence[str],
    by_name: Mapping[str, list[str]],
    by_upload: Mapping[str, list[str]],
) -> Match:
    """Return the best match for the alternative names of one photograph.

    A name that is a whole path is tried first.
    """
    reason = "no name of a photograph"
    split = list(filter(None, map(_parts_of, alternatives)))
    if whole := next(
        ("/".join(parts) for parts in split if "/".join(parts) in by_name.get(parts[-1], ())), None
    ):
        return Match(whole)
    for parts in split:
        if ".." in parts:
            reason = (
                "the name leads out of the folder; write it below the folder of the photographs"
            )
            continue
        original = _UPLOAD_PREFIX.sub("", parts[-1])
        keys = (
            by_name.get(parts[-1]) or by_name.get(original) or by_upload.get(_as_uploaded(original))
        )
        if keys:
            return _best(parts, keys)
        reason = f"no photograph called {printable(parts[-1])}"
    return Match(None, reason)


def _parts_of(name: str) -> list[str]:
    return [part for part in re.findall(r"[^\\/]+", name.lower()) if part != "."]


def _with_other_extension(
    match: Match, names: Sequence[str], by_stem: Mapping[str, list[str]]
) -> Match:
    """Return the photograph that differs from one of the names only in its extension, if there is
    just one; else `match`.
    """
    pairs = {
        (parts[-1], key)
        for parts in map(_parts_of, names)
        if parts and ".." not in parts
        for key in by_stem.get(PurePosixPath(parts[-1]).stem, ())
    }
    if len({key for _, key in pairs}) != 1:
        return match
    name, key = min(pairs)
    return Match(key, is_exact=False, note=f"{printable(name)} is {printable(key)}")


def _best(parts: Sequence[str], keys: list[str]) -> Match:
    # How many parts are equal at the end. The file name always counts: uploads may spell it
    # differently.
    folders = {key: PurePosixPath(key).parts[-2::-1] for key in keys}
    common = {}
    for key in keys:
        are_equal = [one == other for one, other in zip(parts[-2::-1], folders[key], strict=False)]
        common[key] = 1 + [*are_equal, False].index(False)
    most = max(common.values())
    best = [key for key in keys if common[key] == most]
    if most == len(parts):  # images/a.jpg rather than images/old/a.jpg
        shortest = min(len(folders[key]) for key in best)
        best = [key for key in best if len(folders[key]) == shortest]
    if len(best) > 1:
        return Match(
            None,
            f"{len(best)} photographs have this name, such as {printable(best[0])}; name the "
            "folder",
        )
    return Match(best[0], is_exact=most == len(parts))


def _as_uploaded(name: str) -> str:
    """Return a file name as Django stores an uploaded file: spaces become underscores, other signs
    vanish.
    """
    return re.sub(r"[^-\w.]", "", name.strip().replace(" ", "_"))


def match_name(name: str, photographs: Mapping[str, Photograph]) -> Match:
    """Return the photograph of EPRI's name, which has no folders."""
    key = name.lower()
    return (
        Match(key) if key in photographs else Match(None, f"no photograph called {printable(name)}")
    )
