"""Lists, annotators' logs, the prepared format, pictures, metrics; and what is said about bad
input.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from crowd_bt import annotators, metrics
from crowd_bt.comparisons import (
    SPLITS,
    Comparison,
    load_local,
    load_prepared,
    split_rows,
    write_prepared,
)
from crowd_bt.images import Pairs, load_image
from crowd_bt.make_data import Picture, compare, damaged

from recipes.crowd_bt.tests.small import SIZE_PX, photographs, write_data
from tests.support.plugin import read_json
from tests.support.recipes import assert_refused

SHUFFLED = [np.random.default_rng(seed).permutation(8).tolist() for seed in range(400)]
PAIR = {"img1": "a", "img2": "b", "expected_choice": "left"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data"))


@pytest.fixture
def two_images(tmp_path: Path) -> Path:
    """Return a folder with the images `a` and `b`, which are never opened."""
    for name in ("a", "b"):
        (tmp_path / name).write_text("")
    return tmp_path


def test_lists_are_split_80_to_20_within_each_pair_type(data: Path) -> None:
    lines: list[str] = []
    found, again, other = (
        load_local(data, data / "images", seed, lines.append) for seed in (42, 42, 43)
    )
    assert [len(found.of(split)) for split in SPLITS] == [72, 18, 90]
    kinds = ("gold_gold", "anchor_anchor", "anchor_regular")
    assert Counter(row.pair_type for row in found.val) == dict.fromkeys(kinds, 6)
    assert not set(map(id, found.train)) & set(map(id, found.val))
    assert found == again != other
    assert (len(found.known_order), found.measured, lines) == (42, {}, [])


def test_absent_lists_and_images_are_reported_and_left_out(two_images: Path) -> None:
    images = two_images / "images"
    images.mkdir()
    for path in (images / "a.png", images / "b.png", two_images / "secret.png"):
        path.write_text("")
    outside = [("../secret.png", "b.png"), (str(two_images / "secret.png"), "b.png")]
    pairs = [*[("a.png", "b.png")] * 5, ("a.png", "no.png"), *outside]
    items = [
        {"img1": one, "img2": two, "expected_choice": "left", "type": "gold_gold"}
        for one, two in pairs
    ]
    (two_images / "gold_batch.json").write_text(json.dumps(items))
    lines: list[str] = []
    found = load_local(two_images, images, 0, lines.append)
    assert len(found.of("all")) == 5
    assert [line.split(": ")[1] for line in lines[:2]] == ["not there, skipped"] * 2
    assert lines[2].startswith("WARNING: 3 of 8 comparisons are left out: 3 images are not in")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('[{"img1": "a"\n,,', "gold_batch.json:2: not valid JSON"),
        ('{"img1": 1}', "expected a list of comparisons, found a dict"),
        (
            '[{"img1": "a", "expected_choice": "left"}]',
            "item 1: expected an object with the file names img1 and img2",
        ),
        (
            json.dumps([{**PAIR, "expected_choice": "lft"}]),
            "item 1: expected_choice 'lft' is not left, right or draw",
        ),
        ("[" * 100_000, "not valid JSON"),
        (
            "[]",
            "none of gold_batch.json, Anchor_Anchor.json, Anchor_Regular.json has a comparison; "
            "python make_data",
        ),
        (json.dumps([PAIR]), "0 training and 0 validation comparisons remain"),
    ],
)
def test_bad_lists_are_refused_in_one_line(tmp_path: Path, text: str, complaint: str) -> None:
    (tmp_path / "gold_batch.json").write_text(text)
    with assert_refused(complaint):
        load_local(tmp_path, tmp_path, 0, lambda line: None)


def test_a_damaged_image_is_named(tmp_path: Path) -> None:
    file = tmp_path / "bad.png"
    file.write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(range(99)))
    with assert_refused(f"{file}: ", "; replace the image, or remove it from the lists"):
        load_image(file, SIZE_PX)


def test_categories_have_ranks() -> None:
    ranks = {
        "goldensample_3": 100,
        "x_POS_5": 5,
        "spraying_POS_0": 0,
        "POS_7": -1,
        None: -1,
        "other": -1,
    }
    assert {category: annotators.category_rank(category) for category in ranks} == ranks


def gold(first: str, second: str, choice: str) -> dict[str, str]:
    categories = {"img1_category": first, "img2_category": second}
    return {"pair_type": "gold_gold", "img1": "a", "img2": "b", "choice": choice, **categories}


def test_reliability_counts_right_answers_and_half_of_near_draws() -> None:
    items: list[Any] = [
        gold("goldensample", "POS_5", "left"),  # right
        gold("POS_2", "POS_2", "draw"),  # right
        gold("POS_2", "POS_3", "draw"),  # near: a half
        gold("goldensample", "POS_5", "draw"),  # a golden sample is never near
        gold("POS_1", "POS_3", "draw"),  # too far apart
        gold("POS_1", "POS_3", "left"),  # wrong
        {**gold("POS_1", "POS_3", "left"), "pair_type": "anchor_anchor"},  # no gold pair
        "nonsense",
    ]
    assert annotators.user_reliability(items) == pytest.approx(2.5 / 6)
    assert annotators.user_reliability(items[6:]) is None


def test_test_users_are_dropped_and_users_without_gold_pairs_are_no_guessers() -> None:
    right, wrong = gold("POS_5", "POS_0", "left"), gold("POS_5", "POS_0", "right")
    logs = {
        "dummy_1": {"comparisons": [right]},
        "good": {"comparisons": [right, right, {"img1": "a"}]},
        "poor": {"comparisons": [right, wrong, wrong]},
        "new": {"comparisons": [{**right, "pair_type": "anchor_anchor"}]},
        "broken": [1],
    }
    crowd = annotators.read_crowd(logs)
    found = [(row.annotator_id, row.annotator_reliability) for row in crowd.rows]
    assert found == [("good", 1.0)] * 2 + [("new", None)] + [("poor", pytest.approx(1 / 3))] * 3
    assert crowd.reliabilities == {"good": 1.0, "new": None, "poor": pytest.approx(1 / 3)}
    assert crowd.notes == [
        "WARNING: broken: its log holds no list of comparisons; left out",
        "6 comparisons of 3 users; dropped 1 test users, 1 unreadable entries",
    ]


def test_worse_than_guessing_is_used_only_where_reliabilities_are_learned(two_images: Path) -> None:
    reliabilities = {"eve": 0.2, "ann": 0.9, "new": None}
    rows = [Comparison("a", "b", 1, "x", 1.0, name, value) for name, value in reliabilities.items()]
    write_prepared(two_images, rows * 10, {"user_reliabilities": {}}, 3)
    lines: list[str] = []
    fixed, learned = (
        load_prepared(two_images, two_images, lines.append, learns_eta=learns) for learns in (0, 1)
    )
    assert "eve" not in {row.annotator for row in [*fixed.of("all"), *learned.val]}
    assert {row.annotator for row in learned.train} == {"ann", "new", "eve"}
    assert "annotations by annotators of a reliability below 0.5 are left out" in lines[0]


def test_the_prepared_format_keeps_every_field(two_images: Path) -> None:
    values = {f"user{number}": 0.5 + number / 40 for number in range(20)}
    rows = [
        Comparison("a", "b", number % 3 - 1, "gold_gold", 1.5, name, value)
        for number, (name, value) in enumerate(values.items())
    ]
    write_prepared(two_images, rows, {"user_reliabilities": {"user0": 0.5}, "bucket": "x"}, 3)
    found = load_prepared(two_images, two_images, print)
    assert (found.train, found.val) == split_rows(rows, 3)
    assert found.measured == values
    facts = read_json(two_images / "metadata.json")
    assert facts == {
        "uses_fixed_eta": True,
        "seed": 3,
        "num_train": 16,
        "num_val": 4,
        "num_users": 1,
        "bucket": "x",
    }
    assert read_json(two_images / "user_reliabilities.json") == {"user0": 0.5}
    file = two_images / "train_comparisons.json"
    file.write_text(
        file.read_text().replace('"annotator_reliability": 0.5', '"annotator_reliability": 7', 1)
    )
    with assert_refused("annotator_reliability 7 is not a number from 0 to 1", f"{file}: item "):
        load_prepared(two_images, two_images, print)


def test_a_sample_depends_on_seed_epoch_and_index_only(data: Path) -> None:
    rows = load_local(data, data / "images", 42, print).train
    pairs, again, other = (Pairs(rows, data / "images", SIZE_PX, seed) for seed in (5, 5, 6))
    first = pairs[1, 3]["images"]
    _ = again[0, 2], np.random.default_rng(0).random(), torch.rand(3)
    assert torch.equal(again[1, 3]["images"], first)
    assert not torch.equal(pairs[2, 3]["images"], first)
    assert not torch.equal(other[1, 3]["images"], first)
    assert (first.shape, first.dtype) == ((2, 3, SIZE_PX, SIZE_PX), torch.uint8)


@pytest.mark.parametrize("damage", ["blur", "noise", "jpeg"])
def test_each_level_damages_more_than_the_one_before(damage: str) -> None:
    image = photographs()[0][1][:64, :64]
    images = [
        damaged(image, damage, level, np.random.default_rng(0)).astype(float) for level in range(7)
    ]
    errors = [np.abs(worse - image).mean() for worse in images]
    assert errors[0] == 0
    assert np.all(np.diff(errors) > 0), errors


def test_an_annotator_follows_the_order_as_often_as_told() -> None:
    generator = np.random.default_rng(0)
    for reliability in (0.8, 0.1):
        answers = Counter(
            compare(Picture("a", 1), Picture("b", 4), reliability, generator) for _ in range(4000)
        )
        assert answers["left"] / 4000 == pytest.approx(reliability, abs=0.02)
        assert set(answers) == {"left", "right"}
    assert compare(Picture("a", 2), Picture("b", 2), 1.0, generator) == "draw"


def test_accuracies_by_pair_type_put_gold_first_and_skip_draws() -> None:
    scores = {"a": 3.0, "b": 1.0, "c": 2.0}
    answers = [("a", "b", 1), ("b", "c", 1), ("a", "c", 0)]
    rows = [
        *(Comparison(*answer, "gold_gold") for answer in answers),
        Comparison("c", "b", 1, "anchor_anchor"),
    ]
    found = metrics.evaluation(rows, scores, {})
    assert list(found["by_pair_type"]) == ["gold_gold", "anchor_anchor"]
    counts = {"correct": 1, "total": 2, "num_comparisons": 3}
    assert found["by_pair_type"]["gold_gold"] == {"accuracy": 0.5, **counts, "mean_margin": 1.5}
    assert (found["gold_gold_accuracy"], found["overall_accuracy"]) == (0.5, pytest.approx(2 / 3))
    assert "known_order" not in found
    assert metrics.evaluation(rows[2:3], scores, {})["overall_accuracy"] is None


def test_agreement_with_a_known_order_by_hand() -> None:
    pytest.importorskip(
        "scipy", reason="needs scipy (pip install -r recipes/crowd_bt/requirements.txt)"
    )
    found = metrics.order_values(
        {"a": 3.0, "b": 1.0, "c": 2.0, "d": 9.9}, {"a": 0, "b": -1, "c": -2}
    )
    # Order by score a c b, known order a b c: two of three pairs agree.
    expected = {"order_accuracy": 2 / 3, "kendall_tau": 1 / 3, "spearman_rho": 0.5, "num_images": 3}
    assert found == pytest.approx(
        {**expected, "most_kendall_tau": 1, "chance_error": (22 / 54) ** 0.5}
    )
    scores = {name: float(number) for number, name in enumerate("abcdefgh")}
    # levels 0, 1 and 2
    found = metrics.order_values(scores, {name: int(score) // 3 for name, score in scores.items()})
    # what a perfect order reaches
    assert found["kendall_tau"] == pytest.approx(found["most_kendall_tau"])
    taus = [
        metrics.order_values(dict(zip(scores, order, strict=True)), scores)["kendall_tau"]
        for order in SHUFFLED
    ]
    assert np.std(taus) == pytest.approx(found["chance_error"], rel=0.1)
    evaluation = {**metrics.evaluation([], scores, scores), "known_order": found}
    assert (
        metrics.evaluation_lines(evaluation)[-1]
        == "  A Kendall tau of 0 ± 0.29 is chance, 0.87 a perfect order"
    )
    assert metrics.order_values({"a": 1.0, "b": 2.0}, {"a": 1, "b": 1}) == {}
