"""Finds the photographs that annotation files name. A name is only compared with the files that are there, never opened."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from utils.common.errors import printable
from utils.sources.parsing.sources import Photograph

Parts = tuple[str, ...]
_UPLOAD_PREFIX = re.compile(r"^[0-9a-f]{6,12}-")  # Label Studio puts it before the name of an uploaded file


@dataclass(frozen=True)
class Match:
    """The key of the photograph that a name stands for, or the reason why there is none."""

    key: str | None
    reason: str = ""
    is_exact: bool = False


def match_names(wanted: Iterable[Sequence[str]], photographs: Mapping[str, Photograph]) -> list[Match]:
    """Return a match for each list of alternative names, by file name and as many folders as agree.

    A match whose folders differ counts only if no other name claims the photograph. Upper and lower case do not matter.
    """
    index = _Index(photographs)
    names = [tuple(alternatives) for alternatives in wanted]
    matches = [index.match(alternatives) for alternatives in names]
    claims: dict[str, set[tuple[str, ...]]] = defaultdict(set)
    is_claimed_exactly = {match.key for match in matches if match.is_exact}
    for alternatives, match in zip(names, matches, strict=True):
        if match.key is not None and not match.is_exact:
            claims[match.key].add(alternatives)
    return [
        Match(None, "other names fit the only photograph called so; put the photographs into the folders of the names")
        if match.key is not None
        and not match.is_exact
        and (match.key in is_claimed_exactly or len(claims[match.key]) > 1)
        else match
        for match in matches
    ]


class _Index:
    def __init__(self, photographs: Mapping[str, Photograph]) -> None:
        self._by_name: dict[str, list[tuple[Parts, str]]] = defaultdict(list)
        self._by_upload: dict[str, list[tuple[Parts, str]]] = defaultdict(list)
        for key in photographs:
            parts = PurePosixPath(key).parts
            self._by_name[parts[-1]].append((parts, key))
            self._by_upload[_as_uploaded(parts[-1])].append((parts, key))

    def match(self, alternatives: Sequence[str]) -> Match:
        """Return the best match of some names of one photograph."""
        reason = "no name of a photograph"
        for name in alternatives:
            parts = tuple(part for part in re.split(r"[\\/]+", name.lower()) if part not in ("", "."))
            if not parts:
                continue
            if ".." in parts:
                reason = "the name leads out of the folder; write it below the folder of the photographs"
                continue
            found = self._by_name.get(parts[-1]) or self._uploaded(parts[-1])
            if found:
                return _best(parts, found)
            reason = f"no photograph called {printable(parts[-1])}"
        return Match(None, reason)

    def _uploaded(self, name: str) -> list[tuple[Parts, str]]:
        """Return the photographs that Label Studio may have called `name` when they were uploaded."""
        original = _UPLOAD_PREFIX.sub("", name)
        return self._by_name.get(original) or self._by_upload.get(_as_uploaded(original), [])


def _best(parts: Parts, found: list[tuple[Parts, str]]) -> Match:
    common = [_num_common(parts, candidate) for candidate, _ in found]
    most = max(common)
    best = [item for item, number in zip(found, common, strict=True) if number == most]
    if most == len(parts):  # images/a.jpg rather than images/old/a.jpg
        shortest = min(len(candidate) for candidate, _ in best)
        best = [item for item in best if len(item[0]) == shortest]
    if len(best) > 1:
        return Match(None, f"{len(best)} photographs have this name, such as {printable(best[0][1])}; name the folder")
    return Match(best[0][1], is_exact=most == len(parts))


def _num_common(first: Parts, second: Parts) -> int:
    """Return how many parts agree at the end; the file name, for which uploads have other spellings, always counts."""
    number = 1
    while number < min(len(first), len(second)) and first[-1 - number] == second[-1 - number]:
        number += 1
    return number


def _as_uploaded(name: str) -> str:
    """Return a file name as Django stores an uploaded file: spaces become underscores, other signs vanish."""
    return re.sub(r"[^-\w.]", "", name.strip().replace(" ", "_"))
