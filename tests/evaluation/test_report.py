"""report.html: its numbers, its safety against hostile names, its pictures, and how it behaves in a real browser."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.browser import CHROMIUM, Page, browser_page
from tests.evaluation.test_confidence import made_up_results
from tests.oracle import NAMES, SIZE_PX, Oracle, draw_photos
from utils.data.dataset import SegmentationDataset
from utils.data.images import decode_image, encode_jpeg
from utils.data.loader import ShardBatches, get_dataloader
from utils.evaluation.evaluate import FULL_PRECISION, PhotoPixels, evaluate
from utils.evaluation.metrics import calibration, operating_points, precision_recall_curves, summarise
from utils.evaluation.native_masks import sizes_on_disk
from utils.evaluation.report import Subject, Viewer, build_page, choose_worst, count_errors, draw_cards
from utils.evaluation.report.gallery import CONFUSED, RIGHT, WRONG, Card
from utils.yolo.loss import SegmentationLoss

HOSTILE = (
    '</script><script>document.title="broken"</script>',
    '"><img src=x onerror=document.title="broken">',
    "'; DROP & <b>bold</b> &amp; --></style><!--",
    "javascript:alert(1)\u202e\x00\n\ud800 name",
)
CPU = torch.device("cpu")


class Elements(HTMLParser):
    """Lists what a page consists of: (element, attributes), and the text right behind each `data-key`."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.figures: list[tuple[dict[str, str | None], str]] = []
        self.text: list[str] = []
        self._open: dict[str, str | None] | None = None
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self._open = dict(attrs) if any(name == "data-key" for name, _ in attrs) else None

    def handle_data(self, data: str) -> None:
        self.text.append(data)
        if self._open is not None:
            self.figures.append((self._open, data))
            self._open = None


def made_up_subject(names: Sequence[str], seed: int, num_images: int = 30) -> Subject:
    results = made_up_results(seed, num_images, len(names))
    metrics = {
        "model": f"models/{names[0]}/best.pt",
        "data": "data/dataset.yaml",
        "split": "val",
        "img_size": 640,
        "mask_resolution": "proto",
        **summarise(results, list(names)),
        "val_loss": 1.25 + seed,
        "by_size": {
            size: {
                "num_targets": 7,
                **{f"{kind}_{name}": value for kind in ("box", "mask") for name in ("map50", "map50_95")},
            }
            for size, value in (("small", None), ("medium", 0.1 / 3), ("large", 0.7))
        },
        "operating_points": operating_points(results, names),
        "calibration": calibration(results),
        "worst_images": [made_up_card(1, number).errors for number in range(3)],
    }
    return Subject(json.loads(json.dumps(metrics)), precision_recall_curves(results, list(names)))


def made_up_card(num_models: int, number: int, file: str = "photo.jpg") -> Card:
    picture = encode_jpeg(np.full((120, 160, 3), 60 * number, np.uint8))
    errors = {
        "file": file,
        "image_id": number,
        "num_targets": 9,
        "missed": 3 - number,
        "false": number,
        "confused": 2 * number,
    }
    return Card(errors, picture, [picture] * num_models)


def check_figures(page: str, metrics: Sequence[dict[str, Any]]) -> int:
    """Compare every figure of a page with metrics.json, to the last bit; return how many there are."""
    figures = Elements(page).figures
    for attributes, text in figures:
        value: Any = metrics[int(attributes.get("data-model") or 0)]
        for step in str(attributes["data-key"]).split("."):
            value = None if value is None else value[int(step) if isinstance(value, list) else step]
        if value is None:
            assert text == "–", attributes
        else:
            assert json.loads(str(attributes["data-value"])) == value, attributes
            assert float(text) == pytest.approx(value, abs=0.00050001), attributes
    return len(figures)


@pytest.mark.parametrize("num_models", [1, 2])
def test_every_figure_is_that_of_metrics_json(num_models: int) -> None:
    names = ("pole", "crossarm", "insulator")
    subjects = [made_up_subject(names, seed) for seed in range(num_models)]
    page = build_page(subjects, [made_up_card(num_models, number) for number in range(3)])
    assert check_figures(page, [subject.metrics for subject in subjects]) > 100 * num_models
    shown = {str(attributes["data-key"]) for attributes, _ in Elements(page).figures}
    for kind in ("box", "mask"):
        for name in ("map50", "map50_95", "precision", "recall", "f1"):
            assert {f"{kind}_{name}", *(f"per_class.{number}.{kind}_{name}" for number in range(3))} <= shown
        assert {
            f"by_size.large.{kind}_map50_95",
            f"calibration.{kind}.error",
            f"operating_points.{kind}.2.threshold",
        } <= shown
    wrong = {**subjects[0].metrics, "mask_map50": 0.123}
    with pytest.raises(AssertionError):
        check_figures(page, [wrong, *(subject.metrics for subject in subjects[1:])])


def test_the_difference_of_two_models_is_the_second_minus_the_first() -> None:
    first, second = (made_up_subject(("pole", "crossarm"), seed) for seed in (1, 2))
    page = build_page([first, second], [])
    gain = second.metrics["mask_map50_95"] - first.metrics["mask_map50_95"]
    assert f'data-value="{json.dumps(gain)}"' in page
    assert ("▲ +" if gain > 0 else "▼ −") + f"{abs(gain):.3f}" in page


def test_a_class_without_targets_has_no_score_rather_than_nought() -> None:
    subject = made_up_subject(("pole", "crossarm"), 3)
    subject.metrics["per_class"][1]["num_targets"] = 0
    keys = {attributes["data-key"] for attributes, _ in Elements(build_page([subject], [])).figures}
    assert "per_class.0.mask_map50" in keys
    assert "per_class.1.mask_map50" not in keys


def test_nothing_found_and_nothing_there_still_make_a_page() -> None:
    metrics = made_up_subject(("pole",), 0).metrics
    results = made_up_results(0, 0, 1)
    empty = {**metrics, **summarise(results, ["pole"]), "calibration": calibration(results), "worst_images": []}
    empty["operating_points"] = operating_points(results, ["pole"])
    page = build_page([Subject(empty, precision_recall_curves(results, ["pole"]))], [])
    assert "No image has an error" in page
    assert check_figures(page, [empty]) > 10


def test_names_cannot_become_markup() -> None:
    subject = made_up_subject(HOSTILE, 1)
    page = build_page([subject], [made_up_card(1, number, HOSTILE[number]) for number in range(3)])
    parsed = Elements(page)
    tags = [tag for tag, _ in parsed.found]
    assert tags.count("script") == 1
    assert tags.count("img") == 6, "two for each image of the gallery and no other"
    assert tags.count("b") == 3, "model, data and split"
    for _, attributes in parsed.found:
        assert not [name for name in attributes if name.startswith("on")], attributes
    text = "".join(parsed.text)
    assert all(name in text for name in HOSTILE[:3]), "what is printable is shown as it is"
    assert "\\u202e\\x00\\n\\ud800 name" in text, "the rest is spelt out"
    page.encode("utf-8")  # no half surrogate is left


def test_the_page_may_load_nothing() -> None:
    parsed = Elements(build_page([made_up_subject(("pole",), 1)], [made_up_card(1, 0)]))
    policy = next(
        str(facts["content"]) for tag, facts in parsed.found if facts.get("http-equiv") == "Content-Security-Policy"
    )
    assert "default-src 'none'" in policy
    for tag, facts in parsed.found:
        for name in ("src", "href"):
            assert str(facts.get(name) or "#").startswith(("data:", "#")), (tag, facts)
        assert tag != "img" or facts.get("alt"), facts
        assert tag != "th" or facts.get("scope"), facts


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Viewer, list[Any]]:
    """Photographs, a stand-in for a model, and what the evaluation makes of them."""
    photos = draw_photos(tmp_path_factory.mktemp("photos"), 14)
    dataset, model = SegmentationDataset(photos, SIZE_PX), Oracle(photos)
    loader = get_dataloader(dataset, ShardBatches(len(photos), 5, 0, 1), 0, False)
    criterion = SegmentationLoss(model)
    found = evaluate(model, loader, NAMES, criterion, CPU, photo=PhotoPixels(sizes_on_disk(photos)))
    return Viewer(model, criterion.strides, dataset, NAMES, CPU, FULL_PRECISION, False), found.results


def test_the_errors_of_all_images_are_those_of_the_confusion_matrix(judged: tuple[Viewer, list[Any]]) -> None:
    _, results = judged
    errors = count_errors(results, len(NAMES))
    matrix = np.array(summarise(results, list(NAMES))["confusion_matrix"])
    inside = matrix[:-1, :-1]
    assert sum(row["missed"] for row in errors) == matrix[-1].sum() > 0
    assert sum(row["false"] for row in errors) == matrix[:, -1].sum() > 0
    assert sum(row["confused"] for row in errors) == inside.sum() - np.trace(inside) > 0


def test_the_worst_images_are_those_with_the_most_errors_of_each_kind() -> None:
    def row(image_id: int, missed: int, false: int, confused: int) -> dict[str, int]:
        return {"image_id": image_id, "num_targets": 9, "missed": missed, "false": false, "confused": confused}

    rows = [row(0, 0, 0, 0), row(1, 1, 0, 0), row(2, 0, 1, 0), row(3, 0, 0, 1), row(4, 3, 3, 0), row(5, 2, 2, 0)]
    assert [one["image_id"] for one in choose_worst(rows, 3)] == [4, 5, 3], "also the only one with a confusion"
    assert [one["image_id"] for one in choose_worst(rows, 99)] == [4, 5, 1, 2, 3], "never one without errors"


def test_the_pictures_show_what_was_counted_and_stay_within_their_bytes(judged: tuple[Viewer, list[Any]]) -> None:
    viewer, results = judged
    worst = choose_worst(count_errors(results, len(NAMES)))
    cards = draw_cards(worst, [viewer, viewer])
    assert len(cards) == len(worst)

    def shows(picture: bytes, color: tuple[int, int, int]) -> bool:
        """Whether an outline of this colour is in a picture; JPEG blurs it a little."""
        return bool((np.abs(decode_image(picture).astype(int) - color).max(axis=2) < 45).sum() > 3)

    for card in cards:
        assert card.predictions[0] == card.predictions[1]
        assert shows(card.truth, WRONG) == (card.errors["missed"] > 0), card.errors
        assert shows(card.predictions[0], WRONG) == (card.errors["false"] > 0), card.errors
        assert shows(card.truth, CONFUSED) == shows(card.predictions[0], CONFUSED) == (card.errors["confused"] > 0)
    assert any(shows(card.truth, RIGHT) for card in cards)
    largest = len(cards[0].truth) + 2 * len(cards[0].predictions[0])
    assert len(draw_cards(worst, [viewer, viewer], max_bytes=largest)) == 1
    assert draw_cards(worst, [viewer, viewer], max_bytes=largest - 1) == []


needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (apt-get install chromium)")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    if CHROMIUM is None:
        pytest.skip("needs Chromium (apt-get install chromium)")
    with browser_page(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Pages of 8 classes, of 80 and two models, and of hostile names."""
    folder = tmp_path_factory.mktemp("reports")
    many = tuple(f"class number {number}" for number in range(80))
    pages = {
        "plain": build_page([made_up_subject(many[:8], 1)], [made_up_card(1, number) for number in range(3)]),
        "large": build_page([made_up_subject(many, seed) for seed in (1, 2)], [made_up_card(2, 1)]),
        "hostile": build_page([made_up_subject((*HOSTILE, "x" * 400), 1)], [made_up_card(1, 1, HOSTILE[1] * 5)]),
    }
    for name, text in pages.items():
        (folder / f"{name}.html").write_text(text, encoding="utf-8")
    return {name: folder / f"{name}.html" for name in pages}


@needs_chromium
@pytest.mark.parametrize("name", ["plain", "large", "hostile"])
def test_a_browser_shows_it_without_a_complaint_at_any_width(page: Page, reports: dict[str, Path], name: str) -> None:
    page.complaints.clear()
    page.requests.clear()
    for width_px, scheme in ((400, "light"), (1400, "dark")):
        page.open(reports[name], width_px, scheme)
        assert page.run("document.documentElement.scrollWidth") <= width_px, "the page scrolls sideways"
        assert page.run("[...document.images].every(image => image.complete && image.naturalWidth > 0)")
        assert page.run("document.images.length") > 0
        bright = page.run("getComputedStyle(document.body).backgroundColor")
        assert (bright == "rgb(255, 255, 255)") == (scheme == "light")
    assert page.run("document.title").startswith("Evaluation of"), "a name has run as a script"
    assert page.complaints == []
    assert all(url.startswith(("file:", "data:")) for url in page.requests), page.requests


@needs_chromium
def test_the_browser_does_report_what_it_refuses(page: Page, reports: dict[str, Path], tmp_path: Path) -> None:
    """The control: a page that loads and runs what it may not is complained about."""
    spoilt = tmp_path / "spoilt.html"
    text = reports["plain"].read_text(encoding="utf-8")
    spoilt.write_text(
        text.replace("<main>", '<main><img src="https://example.org/x.png"><script>1</script>'), encoding="utf-8"
    )
    page.complaints.clear()
    page.open(spoilt, 400)
    assert len(page.complaints) == 2, page.complaints


@needs_chromium
def test_a_click_on_a_heading_sorts_the_table(page: Page, reports: dict[str, Path]) -> None:
    page.open(reports["plain"], 1400)
    column = "[...document.querySelectorAll('#classes .kind-mask tbody tr')].map(row => row.cells[1].dataset.value)"
    heading = "document.querySelectorAll('#classes .kind-mask thead th')[1]"
    before = [float(value) for value in page.run(column)]
    assert before not in (sorted(before), sorted(before, reverse=True)), (
        "this proves nothing if they are in order already"
    )
    page.run(f"{heading}.querySelector('button').click()")
    assert [float(value) for value in page.run(column)] == sorted(before, reverse=True)
    assert page.run(f"{heading}.getAttribute('aria-sort')") == "descending"
    page.run(f"{heading}.querySelector('button').click()")
    assert [float(value) for value in page.run(column)] == sorted(before)
    page.run("document.querySelector('#classes .kind-mask thead button').click()")
    names = page.run("[...document.querySelectorAll('#classes .kind-mask tbody th')].map(cell => cell.textContent)")
    assert names == sorted(names)
    assert page.run(f"{heading}.getAttribute('aria-sort')") is None
    assert page.run("document.querySelector('#classes .kind-mask tfoot th').textContent") == "all", (
        "the sum stays below"
    )


@needs_chromium
def test_masks_and_boxes_curves_and_pictures_answer_to_clicks(page: Page, reports: dict[str, Path]) -> None:
    page.open(reports["plain"], 1400)
    shown = "[...document.querySelectorAll('#classes > div')].map(part => part.offsetParent !== null)"
    assert page.run(shown) == [True, False]
    page.run("document.querySelector('#show-box').click()")
    assert page.run(shown) == [False, True]
    page.run("document.querySelector('.legend button').click()")
    assert page.run("document.querySelectorAll('polyline.lit').length") == 8, "four charts of masks and four of boxes"
    cards = "[...document.querySelectorAll('.gallery article')].map(card => Number(card.dataset.missed))"
    page.run("document.querySelector('.order button[data-by=missed]').click()")
    assert page.run(cards) == [3, 2, 1]
    page.run("document.querySelector('.order button[data-by=all]').click()")
    assert page.run(cards) == [1, 2, 3]
    page.run("document.querySelector('.zoom').click()")
    assert page.run("document.querySelector('dialog').open && document.querySelectorAll('dialog img').length") == 1


@needs_chromium
def test_the_pointer_over_a_curve_shows_the_value_that_the_curve_has_there(
    page: Page, reports: dict[str, Path]
) -> None:
    page.open(reports["plain"], 1400)
    subject = made_up_subject(tuple(f"class number {number}" for number in range(8)), 1)
    mean = subject.curves["mask"]["recall"].mean(axis=0)[round(999 * 0.3)]
    page.run("document.querySelectorAll('#curves .kind-mask svg.curves')[3].scrollIntoView()")
    x, y = page.run(
        "(() => { const box = document.querySelectorAll('#curves .kind-mask svg.curves')[3].getBoundingClientRect();"
        " return [box.left + box.width * (46 + 0.3 * 402) / 460, box.top + box.height / 2] })()"
    )
    page.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    tip = page.run("document.querySelector('.tip').textContent")
    assert tip.splitlines()[0] == "recall at confidence 0.30"
    value, name = tip.splitlines()[1].split("  ")
    assert name == "mean"
    assert float(value) == pytest.approx(mean, abs=0.001)
