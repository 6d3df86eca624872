"""The report page: every figure is that of metrics.json, and nothing in it can run or load."""

import json
from dataclasses import replace

import pytest

from yolo_seg_ddp.evaluation.metrics.results import ImageResult
from yolo_seg_ddp.evaluation.metrics.summary import (
    calibration,
    operating_points,
    precision_recall_curves,
    summarise,
)
from yolo_seg_ddp.extras.report.page import Subject, build_page
from yolo_seg_ddp.extras.report.photographs import FullView
from yolo_seg_ddp.extras.report.tables import THIN
from yolo_seg_ddp.extras.report.tests.made_up import (
    HOSTILE,
    Elements,
    check_figures,
    made_up_card,
    made_up_subject,
)


@pytest.mark.parametrize("num_models", [1, 2])
def test_every_figure_is_that_of_metrics_json(num_models: int) -> None:
    names = ("pole", "crossarm", "insulator")
    subjects = [made_up_subject(names, seed) for seed in range(num_models)]
    for row in (subjects[0].metrics, *subjects[0].metrics["per_class"]):
        row["num_searched"] = 7
    page = build_page(subjects, [made_up_card(num_models, number) for number in range(3)])
    assert check_figures(page, [subject.metrics for subject in subjects]) > 100 * num_models
    shown = {str(attributes["data-key"]) for attributes, _ in Elements(page).figures}
    assert {"num_searched", "per_class.2.num_searched"} <= shown
    for kind in ("box", "mask"):
        for name in ("map50", "map50_95", "precision", "recall", "f1"):
            assert {
                f"{kind}_{name}",
                *(f"per_class.{number}.{kind}_{name}" for number in range(3)),
            } <= shown
        others = {f"by_size.large.{kind}_map50_95", f"calibration.{kind}.error"}
        assert {*others, f"operating_points.{kind}.2.threshold"} <= shown


def test_the_difference_of_two_models_is_the_second_minus_the_first() -> None:
    first, second = (made_up_subject(("pole", "crossarm"), seed) for seed in (1, 2))
    page = build_page([first, second], [])
    gain = second.metrics["mask_map50_95"] - first.metrics["mask_map50_95"]
    assert f'data-value="{json.dumps(gain)}"' in page
    assert ("▲ +" if gain > 0 else "▼ −") + f"{abs(gain):.3f}" in page


@pytest.mark.parametrize("num_models", [1, 2])
def test_thin_classes_show_their_centrelines_and_others_a_dash(num_models: int) -> None:
    subjects = [made_up_subject(("conductor", "pole"), seed) for seed in range(num_models)]
    plain = build_page(subjects, [])
    assert "Centreline recall" not in plain
    values = {"centreline_recall": 0.75, "centreline_precision": None, "pieces_per_object": 1.25}
    values |= {"length_px": 1200, "missed_px": 300, "invented_px": 0}
    for subject in subjects:
        for row, thin in zip(
            subject.metrics["per_class"], (values, dict.fromkeys(values)), strict=True
        ):
            row.update(thin)
    page = build_page(subjects, [])
    check_figures(page, [subject.metrics for subject in subjects])
    shown = {
        str(facts["data-key"]): text
        for facts, text in Elements(page).figures
        if not facts.get("data-model")
    }
    expected = {
        "centreline_recall": "0.750",
        "centreline_precision": "–",
        "pieces_per_object": "1.25",
    }
    expected |= {"length_px": "1,200", "missed_px": "300", "invented_px": "0"}
    assert {name: shown[f"per_class.0.{name}"] for name in values} == expected
    assert {shown[f"per_class.1.{name}"] for name in values} == {"–"}


def test_a_photograph_at_full_size_has_a_link() -> None:
    view = FullView((2000, 1500), b"", [], [])
    cards = [made_up_card(1, 0), replace(made_up_card(1, 1), view=view)]
    page = build_page([made_up_subject(("pole",), 1)], cards)
    links = [
        facts["href"] for tag, facts in Elements(page).found if tag == "a" and facts["href"] != ""
    ]
    assert [link for link in links if not str(link).startswith("#")] == ["photographs.html#1"]


def test_the_page_begins_with_what_is_found_and_what_is_not() -> None:
    names = ("conductor", "pole", "crossarm", "cutout", "transformer")
    first = (subject := made_up_subject(names, 1)).metrics
    first |= {"num_images": 20, "num_targets": 94, "mask_map50": 0.41}
    facts = ((0.2, 30), (0.62, 40), (0.3, 23), (0.0, 1), (0.0, 0))
    for row, (score, number) in zip(first["per_class"], facts, strict=True):
        row |= {
            "mask_map50": score,
            "num_targets": number,
            "mask_recall": score,
            "mask_precision": 1.0,
        }
        row |= dict.fromkeys(THIN, 0.9 if score == 0.2 else None)
    parsed = Elements(build_page([subject], []))
    told = (
        "Masks of 4 classes in 20 photographs with 94 objects: mAP50 0.410. Found well: pole (40 "
        "objects), "
    )
    told += (
        "conductor (90 % of the length). Found in part: crossarm (23 objects). Not found: cutout "
        "(1 object)."
    )
    assert told in "".join(parsed.text)
    assert (
        sum(facts.get("class") == "kind-mask" for tag, facts in parsed.found if tag == "div")
        == 4 + 5
    )
    shown = {str(facts["data-key"]): text for facts, text in parsed.figures}
    assert shown["per_class.1.mask_precision"] == "1.000"
    assert shown["per_class.3.mask_precision"] == "–", (
        "nothing was found, so a precision of 1 says nothing"
    )
    assert "per_class.4.mask_map50" not in shown, "without objects there is no score"


def test_the_guarantee_is_told_in_words_and_drawn_where_a_recall_is_certain() -> None:
    subject = made_up_subject(("pole", "crossarm"), 1)
    rows = [
        ("pole", "from 0.31 on", {"recall": [0.9, 0.4]}),
        ("crossarm", "no threshold", {"false_alarms": [5, 1]}),
    ]
    given = {
        "promises": {"15 % are found": "a share"},
        "certainty": 0.95,
        "levels": [0.1, 0.9],
        "proof": "not proved",
    }
    given["classes"] = [dict(zip(("class", "words", "certain"), row, strict=True)) for row in rows]
    subject.metrics["guarantee"] = given
    section = (
        build_page([subject], [])
        .partition('<section id="guarantee">')[2]
        .partition("</section>")[0]
    )
    words = (
        "from 0.31 on",
        "no threshold",
        "not proved",
        "15 % are found",
        "Recall that is certain at 95 %",
    )
    assert all(line in section for line in words)
    assert section.count("<polyline") == 1, "that of the pole"


def test_a_page_about_boxes_alone_opened_with_masks_of_0_000() -> None:
    subject = made_up_subject(("pole", "crossarm"), 1)
    for row in (subject.metrics, *subject.metrics["per_class"]):
        row["num_outlined"] = 0
    parsed = Elements(build_page([subject], []))
    opened = [facts["id"] for _, facts in parsed.found if "checked" in facts]
    assert opened == ["show-box"]
    shown = {str(facts["data-key"]): text for facts, text in parsed.figures}
    assert shown["box_recall"] != "–"
    assert shown["mask_recall"] == shown["mask_map50_95"] == "–"


def test_nothing_found_and_nothing_there_still_make_a_page() -> None:
    metrics = made_up_subject(("pole",), 0).metrics
    results: list[ImageResult] = []
    empty = {
        **metrics,
        **summarise(results, ["pole"]),
        "calibration": calibration(results),
        "worst_images": [],
    }
    empty["operating_points"] = operating_points(results, ["pole"])
    page = build_page([Subject(empty, precision_recall_curves(results, ["pole"]))], [])
    assert "No image has an error" in page
    assert check_figures(page, [empty]) > 10


def test_names_cannot_become_markup() -> None:
    subject = made_up_subject(HOSTILE, 1)
    cards = [made_up_card(1, number, HOSTILE[number]) for number in range(3)]
    page = build_page([subject], cards)
    parsed = Elements(page)
    tags = [tag for tag, _ in parsed.found]
    assert tags.count("script") == 1
    assert tags.count("img") == 6, "two for each image of the gallery and no other"
    assert tags.count("b") == 5, "model, data, split, and two scores"
    for _, attributes in parsed.found:
        assert not [name for name in attributes if name.startswith("on")], attributes
    text = "".join(parsed.text)
    assert all(name in text for name in HOSTILE[:3]), "what is printable is shown as it is"
    assert "\\u202e\\x00\\n\\ud800 name" in text, "the rest is spelt out"
    page.encode("utf-8")  # no half surrogate is left


def test_the_page_may_load_nothing() -> None:
    parsed = Elements(build_page([made_up_subject(("pole",), 1)], [made_up_card(1, 0)]))
    metas = [
        facts for _, facts in parsed.found if facts.get("http-equiv") == "Content-Security-Policy"
    ]
    policy = str(metas[0]["content"])
    assert "default-src 'none'" in policy
    for tag, facts in parsed.found:
        for name in ("src", "href"):
            assert str(facts.get(name) or "#").startswith(("data:", "#")), (tag, facts)
        assert tag != "img" or facts.get("alt"), facts
        assert tag != "th" or facts.get("scope"), facts
