"""The report's pictures: what they show is what was counted."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.oracle import NAMES, SIZE_PX, Oracle, WithRegions, draw_photos, evaluate_oracle
from yolo_seg_ddp.data.images import decode_image
from yolo_seg_ddp.data.label_shapes import sizes_on_disk
from yolo_seg_ddp.evaluation.evaluate import AP_LIMITS, FULL_PRECISION, PhotoPixels
from yolo_seg_ddp.evaluation.metrics.results import ImageResult
from yolo_seg_ddp.evaluation.metrics.summary import KINDS_OF_ERROR, choose_worst, count_errors
from yolo_seg_ddp.evaluation.tile_search import Candidate
from yolo_seg_ddp.extras.report import gallery
from yolo_seg_ddp.extras.report.gallery import (
    CONFUSED,
    FALSE,
    IGNORED,
    MISSED,
    RIGHT,
    Thumbnails,
    draw_cards,
)
from yolo_seg_ddp.extras.report.photographs import RESULTS
from yolo_seg_ddp.yolo.loss import SegmentationLoss

Judged = tuple[Candidate, list[ImageResult]]


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Judged:
    """Photographs, a stand-in for a model, and what the evaluation makes of them."""
    photos = draw_photos(tmp_path_factory.mktemp("photos"), 9)
    model = Oracle(photos)
    how = (torch.device("cpu"), FULL_PRECISION, False, AP_LIMITS)
    candidate = Candidate(
        "best.pt", model, SegmentationLoss(model), WithRegions(photos, SIZE_PX), NAMES, *how
    )
    return candidate, evaluate_oracle(
        photos, regions=True, photo=PhotoPixels(sizes_on_disk(photos))
    ).results


def test_the_pictures_show_what_was_counted_and_stay_within_their_bytes(judged: Judged) -> None:
    candidate, results = judged
    worst = choose_worst(count_errors(results, len(NAMES), candidate.dataset.photos))
    cards = draw_cards(worst, [candidate, candidate])
    assert len(cards) == len(worst)

    def shows(picture: bytes, color: tuple[int, int, int]) -> bool:
        """Whether an outline of this colour is in a picture; JPEG blurs it a little."""
        return bool((np.abs(decode_image(picture).astype(int) - color).max(axis=2) < 45).sum() > 3)

    for card in cards:
        assert card.predictions[0] == card.predictions[1]
        assert shows(card.truth, MISSED) == (card.errors["missed"] > 0), card.errors
        assert shows(card.predictions[0], FALSE) == (card.errors["false"] > 0), card.errors
        assert (
            shows(card.truth, CONFUSED)
            == shows(card.predictions[0], CONFUSED)
            == (card.errors["confused"] > 0)
        )
        told: dict[str, int] = {"missed": 0, "false": 0, "confused": 0}
        for line in card.lines:
            number, kind = line.split(": ")[0].split(" × ")
            told[kind] += int(number)
        assert told == {kind: card.errors[kind] for kind in told}, card.lines
    assert any(shows(card.truth, RIGHT) for card in cards)
    largest = len(cards[0].truth) + 2 * len(cards[0].predictions[0])
    assert len(draw_cards(worst[:2], [candidate, candidate], max_bytes=largest)) == 1
    assert draw_cards(worst[:2], [candidate, candidate], max_bytes=largest - 1) == []


def test_every_photograph_is_drawn_once_while_it_is_evaluated_or_every_second_of_many(
    judged: Judged, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    candidate, results = judged
    photos, seen = candidate.dataset.photos, []
    thumbnails = Thumbnails(photos, False, tmp_path)
    size_of = sizes_on_disk(photos)
    colors: list[list[Any]] = []
    draw = gallery.draw_instances

    def noted(*given: Any, **named: Any) -> np.ndarray:
        colors.append(named["colors"])
        return draw(*given, **named)

    monkeypatch.setattr(gallery, "draw_instances", noted)
    see = (thumbnails.see_masks, lambda sample, *_: seen.append(sample.index))
    evaluate_oracle(photos, regions=True, photo=PhotoPixels(size_of, on_masks=see))
    listed = thumbnails.gather()
    assert list(listed) == sorted(set(seen)) == list(range(len(photos)))
    for row, drawn in zip(
        count_errors(results, len(NAMES), candidate.dataset.photos), colors, strict=True
    ):
        counts = {
            kind: drawn.count(color) for kind, color in (("missed", MISSED), ("false", FALSE))
        }
        assert {**counts, "confused": drawn.count(CONFUSED)} == {
            kind: row[kind] for kind in KINDS_OF_ERROR
        }
        photo = listed[row["image_id"]]
        assert photo.size == size_of(row["image_id"])
        assert decode_image(photo.jpeg).shape[1::-1] == (2 * photo.size[0], 2 * photo.size[1]), (
            "small ones are enlarged"
        )
        kinds, rows = [RESULTS[kind] for kind in photo.rows[:, 0]], photo.rows
        assert {kind: kinds.count(kind) for kind in KINDS_OF_ERROR} == {
            kind: row[kind] for kind in KINDS_OF_ERROR
        }
        assert len(rows) == row["num_targets"] + row["false"]
        assert (
            (rows[:, 1] != rows[:, 2]) == [kind in ("missed", "confused") for kind in kinds]
        ).all(), "the classes"
        assert ((rows[:, 3] == -1) == [kind == "missed" for kind in kinds]).all(), (
            "what is missed has no confidence"
        )
        assert (rows[:, 4:6] < rows[:, 6:]).all()
        assert (rows[:, 4:].reshape(-1, 2, 2) <= np.array(photo.size) + 1).all()
    assert any(IGNORED in drawn for drawn in colors)
    monkeypatch.setattr(gallery, "MAX_LISTED", 5)
    assert Thumbnails(photos, False, tmp_path).wanted == {0, 2, 4, 6, 8}


def test_large_photographs_keep_their_size(judged: Judged, monkeypatch: pytest.MonkeyPatch) -> None:
    candidate, results = judged
    worst = choose_worst(count_errors(results, len(NAMES), candidate.dataset.photos))
    assert all(card.view is None for card in draw_cards(worst[:2], [candidate]))
    monkeypatch.setattr(gallery, "MIN_LONG_SIDE_PX", 300)
    monkeypatch.setattr(gallery, "MAX_PHOTOS", 3)
    with monkeypatch.context() as patched:  # as for a photograph of 1 x 100,000 pixels
        patched.setattr(gallery, "NATIVE_LONG_SIDE_PX", 301)
        assert all(card.view is None for card in draw_cards(worst[:1], [candidate]))
    photos = [*candidate.dataset.photos]
    first = worst[0]["image_id"]
    photos[first] = replace(photos[first], boxed=np.array([0]))
    monkeypatch.setattr(candidate.dataset, "photos", photos)
    cards = draw_cards(worst[:5], [candidate, candidate])
    assert cards[0].view is not None
    assert sum(shape.name.endswith(" (box)") for shape in cards[0].view.truth) == 1
    assert [card.view is not None for card in cards] == [True, True, True, False, False]
    for card in cards[:3]:
        assert card.view is not None
        assert decode_image(card.view.jpeg).shape[1::-1] == card.view.size
        assert len(card.view.truth) == card.errors["num_targets"]
        errors = [shape.error for shape in (*card.view.truth, *card.view.predictions)]
        assert errors.count("missed") == card.errors["missed"]
        assert errors.count("false") == card.errors["false"]
        assert errors.count("confused") == 2 * card.errors["confused"]
        for shape in card.view.truth:
            assert (np.concatenate(shape.outlines) <= card.view.size).all()
