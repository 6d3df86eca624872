"""Annotators' logs: their answers, their reliability on gold pairs, and which
answers can be used.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from crowd_bt.comparisons import GOLD, Comparison, image_names, label_of, pair_type_of

from yolo_seg_ddp.utils.errors import printable

TEST_USER = "dummy"  # users whose name begins so are dropped
GOLDEN_SAMPLE = 100  # rank of an image without damage
UNKNOWN_CATEGORY = -1


@dataclass
class Crowd:
    """The comparisons of all users, and what was dropped."""

    rows: list[Comparison] = field(default_factory=list)
    # of every user but test users
    reliabilities: dict[str, float | None] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def category_rank(category: Any) -> int:
    """Return a category's rank by the names in it: goldensample 100, POS_5 to POS_0 5 to 0,
    anything else -1.
    """
    text = category if isinstance(category, str) else ""
    if "goldensample" in text:
        return GOLDEN_SAMPLE
    match = re.search(r"POS_([0-5])", text)
    return int(match[1]) if match else UNKNOWN_CATEGORY


def user_reliability(items: list[Any]) -> float | None:
    """Return r = (correct + near draws / 2) / gold pairs of one user's comparisons; None without
    gold pairs.

    The category's rank says which answer is correct: equal ranks are a draw. A near draw is the
    answer "draw" for ranks that differ by 1 at most, neither of which is a golden sample.
    """
    points, num_gold = 0.0, 0
    for item in items:
        if not isinstance(item, dict) or item.get("pair_type") != GOLD:
            continue
        first, second = (category_rank(item.get(f"{name}_category")) for name in ("img1", "img2"))
        expected = (first > second) - (first < second)
        try:
            answer = label_of(item.get("choice"))
        except ValueError:
            continue
        num_gold += 1
        is_near = abs(first - second) <= 1 and GOLDEN_SAMPLE not in (first, second)
        points += 1.0 if answer == expected else 0.5 if answer == 0 and is_near else 0.0
    return points / num_gold if num_gold else None


def read_crowd(logs: Mapping[str, Any]) -> Crowd:
    """Collect the comparisons of users' logs, each `{"comparisons": [...]}`, by the rules above.

    Every annotation stays a sample of its own, with its user's reliability. Entries that cannot be
    read are counted.
    """
    crowd = Crowd()
    dropped = {"test users": 0, "unreadable entries": 0}
    for user, log in sorted(logs.items()):
        if user.startswith(TEST_USER):
            dropped["test users"] += 1
            continue
        items = log.get("comparisons") if isinstance(log, dict) else None
        if not isinstance(items, list):
            crowd.notes.append(
                f"WARNING: {printable(user)}: its log holds no list of comparisons; left out"
            )
            continue
        reliability = crowd.reliabilities[user] = user_reliability(items)
        rows = [_row(item, user, reliability) for item in items]
        crowd.rows += [row for row in rows if row is not None]
        dropped["unreadable entries"] += rows.count(None)
    counts = ", ".join(f"{number} {what}" for what, number in dropped.items() if number)
    users = len({row.annotator_id for row in crowd.rows})
    crowd.notes.append(
        f"{len(crowd.rows)} comparisons of {users} users"
        + (f"; dropped {counts}" if counts else "")
    )
    return crowd


def _row(item: Any, user: str, reliability: float | None) -> Comparison | None:
    try:
        first, second = image_names(item)
        label = label_of(item.get("choice"))
    except ValueError:
        return None
    return Comparison(
        first, second, label, pair_type_of(item.get("pair_type")), 1.0, user, reliability
    )
