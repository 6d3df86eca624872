"""The report and the list of photographs in a real browser: no complaint, no request, and every
control works.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.support.browser import CHROMIUM, Page, browser_page
from yolo_seg_ddp.data.images import encode_jpeg
from yolo_seg_ddp.extras.report.gallery import FALSE, MISSED, RIGHT
from yolo_seg_ddp.extras.report.page import build_page
from yolo_seg_ddp.extras.report.photographs import (
    PAGE,
    FullView,
    Listed,
    Shape,
    build_photographs,
    region_outlines,
    write_photographs,
)
from yolo_seg_ddp.extras.report.tests.made_up import (
    HOSTILE,
    Elements,
    made_up_card,
    made_up_subject,
)
from yolo_seg_ddp.predict.regions import Region


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
        "plain": build_page(
            [made_up_subject(many[:8], 1)], [made_up_card(1, number) for number in range(3)]
        ),
        "large": build_page([made_up_subject(many, seed) for seed in (1, 2)], [made_up_card(2, 1)]),
        "hostile": build_page(
            [made_up_subject((*HOSTILE, "x" * 400), 1)], [made_up_card(1, 1, HOSTILE[1] * 5)]
        ),
    }
    for name, text in pages.items():
        (folder / f"{name}.html").write_text(text, encoding="utf-8")
    return {name: folder / f"{name}.html" for name in pages}


@pytest.mark.parametrize("name", ["plain", "large", "hostile"])
def test_a_browser_shows_it_without_a_complaint_at_any_width(
    page: Page, reports: dict[str, Path], name: str
) -> None:
    page.complaints.clear()
    page.requests.clear()
    for width_px, scheme in ((400, "light"), (1400, "dark")):
        page.open(reports[name], width_px, scheme)
        assert page.run("document.documentElement.scrollWidth") <= width_px, (
            "the page scrolls sideways"
        )
        assert page.run(
            "[...document.images].every(image => image.complete && image.naturalWidth > 0)"
        )
        assert page.run("document.images.length") > 0
        bright = page.run("getComputedStyle(document.body).backgroundColor")
        assert (bright == "rgb(255, 255, 255)") == (scheme == "light")
    assert page.run("document.title").startswith("Evaluation of"), "a name has run as a script"
    page.assert_harmless()


def test_the_browser_does_report_what_it_refuses(
    page: Page, reports: dict[str, Path], tmp_path: Path
) -> None:
    """The control: a page that loads and runs what it may not is complained about."""
    spoilt = tmp_path / "spoilt.html"
    text = reports["plain"].read_text(encoding="utf-8")
    added = '<main><img src="https://example.org/x.png"><script>1</script>'
    spoilt.write_text(text.replace("<main>", added), encoding="utf-8")
    page.complaints.clear()
    page.open(spoilt, 400)
    assert len(page.complaints) == 2, page.complaints


def test_a_click_on_a_heading_sorts_the_table(page: Page, reports: dict[str, Path]) -> None:
    page.open(reports["plain"], 1400)
    column = (
        "[...document.querySelectorAll('#classes .kind-mask tbody tr')].map(row => "
        "row.cells[1].dataset.value)"
    )
    heading = "document.querySelectorAll('#classes .kind-mask thead th')[1]"
    before = [float(value) for value in page.run(column)]
    assert before not in (sorted(before), sorted(before, reverse=True)), "they are in order already"
    page.run(f"{heading}.querySelector('button').click()")
    assert [float(value) for value in page.run(column)] == sorted(before, reverse=True)
    assert page.run(f"{heading}.getAttribute('aria-sort')") == "descending"
    page.run(f"{heading}.querySelector('button').click()")
    assert [float(value) for value in page.run(column)] == sorted(before)
    page.run("document.querySelector('#classes .kind-mask thead button').click()")
    names = page.run(
        "[...document.querySelectorAll('#classes .kind-mask tbody th')].map(cell => "
        "cell.textContent)"
    )
    assert names == sorted(names)
    assert page.run(f"{heading}.getAttribute('aria-sort')") is None
    below = page.run("document.querySelector('#classes .kind-mask tfoot th').textContent")
    assert below == "all", "the sum stays there"


def test_masks_and_boxes_curves_and_pictures_answer_to_clicks(
    page: Page, reports: dict[str, Path]
) -> None:
    page.open(reports["plain"], 1400)
    shown = (
        "[...document.querySelectorAll('#classes > div')].map(part => part.offsetParent !== null)"
    )
    assert page.run(shown) == [True, False]
    page.run("document.querySelector('#show-box').click()")
    assert page.run(shown) == [False, True]
    page.run("document.querySelector('.legend button').click()")
    assert page.run("document.querySelectorAll('polyline.lit').length") == 8, (
        "four charts of masks and four of boxes"
    )
    cards = (
        "[...document.querySelectorAll('.gallery article')].map(card => "
        "Number(card.dataset.missed))"
    )
    page.run("document.querySelector('.order button[data-by=missed]').click()")
    assert page.run(cards) == [3, 2, 1]
    page.run("document.querySelector('.order button[data-by=all]').click()")
    assert page.run(cards) == [1, 2, 3]
    page.run("document.querySelector('.zoom').click()")
    assert (
        page.run(
            "document.querySelector('dialog').open && document.querySelectorAll('dialog "
            "img').length"
        )
        == 1
    )


def test_the_pointer_over_a_curve_shows_the_value_of_the_curve_there(
    page: Page, reports: dict[str, Path]
) -> None:
    page.open(reports["plain"], 1400)
    subject = made_up_subject(tuple(f"class number {number}" for number in range(8)), 1)
    mean = subject.curves["mask"]["recall"].mean(axis=0)[round(999 * 0.3)]
    page.run("document.querySelectorAll('#curves .kind-mask svg.curves')[3].scrollIntoView()")
    x, y = page.run(
        "(() => { const box = document.querySelectorAll('#curves .kind-mask "
        "svg.curves')[3].getBoundingClientRect();"
        " return [box.left + box.width * (46 + 0.3 * 402) / 460, box.top + box.height / 2] })()"
    )
    page.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    tip = page.run("document.querySelector('.tip').textContent")
    assert tip.splitlines()[0] == "recall at confidence 0.30"
    value, name = tip.splitlines()[1].split("  ")
    assert name == "mean"
    assert float(value) == pytest.approx(mean, abs=0.001)


# --- the list of photographs and their large view: filters, what keyboard and mouse do, outlines
# and files

SIZE = (3000, 2000)
CLASSES = ("conductor", "insulator", "cutout")
MISSED_ROW = (1, 1, -1, -1, 1500, 1200, 1560, 1290)
FALSE_ROWS = tuple((2, 2, 2, 51, *(one + by for one in MISSED_ROW[4:])) for by in (400, -300))
JPEG = encode_jpeg(np.zeros((40, 60, 3), np.uint8))


def made_up_listed(file: str, *rows: Sequence[int]) -> Listed:
    return Listed(Path("/photographs") / file, SIZE, JPEG, np.array(rows, int).reshape(-1, 8))


def made_up_view(name: str = "conductor") -> FullView:
    x = np.linspace(200, 2800, 150)  # an outline of many points
    upper = np.stack([x, 400 + 500 * (x / 2800) ** 2], axis=1)
    wire = [np.concatenate([upper, upper[::-1] + np.array([0, 6])])]
    insulator = [np.array([(1500.0, 1200.0), (1560.0, 1200.0), (1560.0, 1290.0), (1500.0, 1290.0)])]
    false = (insulator[0] + 400, insulator[0] - 300)
    jpeg = encode_jpeg(np.full((SIZE[1], SIZE[0], 3), 120, np.uint8))
    return FullView(
        SIZE,
        jpeg,
        [Shape(wire, name, RIGHT, ""), Shape(insulator, "insulator", MISSED, "missed")],
        [
            Shape(wire, name, RIGHT, "", 0.8),
            *(Shape([part], "cutout", FALSE, "false", 0.51) for part in false),
        ],
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evaluation")
    rows = ((0, 0, 0, 80, 200, 400, 2800, 906), MISSED_ROW, *FALSE_ROWS)
    listed = {4: made_up_listed("1 (1).JPG", *rows), 7: made_up_listed(HOSTILE[1], *rows[:2])}
    listed |= {
        9: made_up_listed("a/2.jpg", (3, 1, 2, 93, 10, 10, 60, 90), rows[0]),
        12: made_up_listed("a/3.jpg", rows[0]),
    }
    listed[13] = made_up_listed("4.jpg")
    views = {4: made_up_view(), 7: made_up_view(HOSTILE[0])}
    write_photographs(folder, listed, views, CLASSES, "models/a b/best.pt")
    return folder


def open_large(page: Page, folder: Path) -> None:
    page.open(folder / PAGE, 1400)
    page.run("document.querySelector('#list button').click()")


def scale_of(page: Page) -> float:
    """Return how many pixels of the screen show one of the photograph."""
    return (
        float(page.run("document.querySelector('.world').getBoundingClientRect().width")) / SIZE[0]
    )


def press(page: Page, key: str, modifiers: int = 0) -> None:
    for kind in ("keyDown", "keyUp"):
        page.call("Input.dispatchKeyEvent", type=kind, key=key, modifiers=modifiers)


def middle_of(page: Page, selector: str) -> tuple[float, float]:
    x, y = page.run(
        f"(() => {{ const box = document.querySelector({selector!r}).getBoundingClientRect();"
        " return [box.left + box.width / 2, box.top + box.height / 2] })()"
    )
    return x, y


def test_a_browser_shows_the_photograph_without_a_complaint(page: Page, folder: Path) -> None:
    page.complaints.clear()
    page.requests.clear()
    wide = (
        "[...document.querySelectorAll('html, nav, .bar, header')].filter(one => one.scrollWidth > "
        "one.clientWidth).length"
    )
    for width_px in (400, 1400):
        page.open(folder / PAGE, width_px)
        page.run("document.querySelector('details').open = true")
        assert page.run(wide) == 0, "the list scrolls sideways"
        assert page.run("document.querySelectorAll('#list li').length") == 5
        page.run("document.querySelector('#list button').click()")
        page.run("document.querySelector('.world img').decode()")
        assert page.run("document.querySelector('.world img').naturalWidth") == SIZE[0]
        assert page.run(wide) == 0, "the large view scrolls sideways"
        frame = page.run("document.querySelector('#stage').getBoundingClientRect().toJSON()")
        shown = page.run("document.querySelector('.world').getBoundingClientRect().toJSON()")
        assert shown["left"] >= frame["left"] - 1
        assert shown["right"] <= frame["right"] + 1
        assert shown["bottom"] <= frame["bottom"] + 1
    assert page.run("document.title") == "Photographs", "a name has run as a script"
    assert not any(url.endswith("/1.jpg") for url in page.requests), (
        "the second is loaded only when it is shown"
    )
    page.assert_harmless()


def test_filters_and_order_choose_what_the_arrow_keys_walk_through(
    page: Page, folder: Path
) -> None:
    page.open(folder / PAGE, 1400)
    script = (
        "((id, value) => { const one = document.getElementById(id); one.value = value; "
        "one.dispatchEvent(new Event('input')); })"
    )
    listed = "[...document.querySelectorAll('#list b')].map(one => one.textContent)"
    every = ["1 (1).JPG", HOSTILE[1], "a/2.jpg", "4.jpg", "a/3.jpg"]  # the most errors first

    def choose(**values: str | float) -> list[str]:
        for name, value in values.items():
            page.run(f"{script}({json.dumps(name)}, {json.dumps(value)})")
        found: list[str] = page.run(listed)
        return found

    assert choose() == every
    assert choose(kind="error", order="name") == [HOSTILE[1], "1 (1).JPG", "a/2.jpg"]
    assert choose(kind="false") == ["1 (1).JPG"]
    assert (
        choose(**{"kind": "confused", "class": "2"}) == choose(**{"class": "1"}) == ["a/2.jpg"]
    ), "taken for it, and it"
    assert choose(**{"kind": "none", "class": ""}) == ["4.jpg", "a/3.jpg"]
    assert choose(kind="correct", order="name", high=0.79) == []
    assert page.run("document.querySelector('#save').disabled")
    assert choose(kind="", low=0.9, high=1) == ["a/2.jpg"]
    assert choose(low=0.3, order="sure") == ["a/2.jpg", HOSTILE[1], "1 (1).JPG", "a/3.jpg"]
    assert choose(order="unsure")[0] == "1 (1).JPG"
    choose(kind="error", low=0.25, order="missed")
    assert (
        page.run("document.querySelector('#count').textContent") == "3 of 5 photographs, 5 objects"
    )
    page.run("document.querySelector('#list button').click()")
    for key, place in (("ArrowRight", 1), ("ArrowRight", 2), ("ArrowRight", 0), ("ArrowLeft", 2)):
        press(page, key)
        assert page.run("document.querySelector('.world img').alt") == choose()[place]


def test_5000_photographs_open_within_two_seconds_and_their_page_stays_small(
    page: Page, tmp_path: Path
) -> None:
    rng = np.random.default_rng(0)
    rows = np.stack(
        [rng.integers(0, high, 5000 * 12) for high in (4, 3, 3, 101, 9000, 9000, 9000, 9000)],
        axis=1,
    )
    listed = {
        number: made_up_listed(f"{number:05}.jpg", *rows[12 * number :][:12])
        for number in range(5000)
    }
    text = build_photographs(listed, {}, CLASSES, "best.pt")
    assert len(text) < 3_000_000
    (tmp_path / PAGE).write_text(text, encoding="utf-8")
    opened_ms = []
    for _ in range(3):  # other processes may hold one up
        page.open(tmp_path / PAGE, 1400)
        opened_ms.append(page.run("performance.getEntriesByType('navigation')[0].loadEventEnd"))
    assert min(opened_ms) < 2000
    assert page.run("document.querySelectorAll('#list li').length") < 200, (
        "the rest follows when one scrolls"
    )


def test_keys_and_buttons_zoom_move_and_toggle(page: Page, folder: Path) -> None:
    open_large(page, folder)
    whole = scale_of(page)
    press(page, "+")
    assert scale_of(page) == pytest.approx(1.5 * whole, rel=1e-3)
    press(page, "1")
    assert scale_of(page) == pytest.approx(1, rel=1e-3)
    left = middle_of(page, ".world")[0]
    press(page, "ArrowRight", modifiers=8)  # with shift
    assert middle_of(page, ".world")[0] == pytest.approx(left - 80)
    press(page, "0")
    assert scale_of(page) == pytest.approx(whole, rel=1e-3)
    drawn = (
        "[...document.querySelectorAll('.world g')].map(one => one.getBoundingClientRect().width > "
        "0)"
    )
    assert page.run(drawn) == [True] * 4, "predictions and labels, each above its edges"
    press(page, "p")
    assert page.run(drawn) == [False, False, True, True]
    page.run("document.querySelector('#show-truth').click()")
    assert page.run(drawn) == [False] * 4
    assert page.run("document.querySelector('#show-predictions').checked") is False


def test_the_wheel_keeps_the_point_under_the_pointer_and_dragging_moves_it(
    page: Page, folder: Path
) -> None:
    open_large(page, folder)
    point = (
        "(() => { const box = document.querySelector('.world').getBoundingClientRect(); return "
        "[(300 - box.left) / box.width, (500 - box.top) / box.height] })()"
    )
    before, whole = page.run(point), scale_of(page)
    page.call("Input.dispatchMouseEvent", type="mouseWheel", x=300, y=500, deltaX=0, deltaY=-400)
    assert scale_of(page) > 1.5 * whole
    assert page.run(point) == pytest.approx(before, abs=1e-3)
    corner = page.run("document.querySelector('.world').getBoundingClientRect().left")
    for kind, x in (("mousePressed", 300), ("mouseMoved", 350), ("mouseReleased", 350)):
        page.call(
            "Input.dispatchMouseEvent",
            type=kind,
            x=x,
            y=500,
            button="left",
            buttons=1,
            clickCount=1,
        )
    moved = page.run("document.querySelector('.world').getBoundingClientRect().left")
    assert moved == pytest.approx(corner + 50, abs=1)


def test_the_next_error_is_brought_to_the_middle(page: Page, folder: Path) -> None:
    open_large(page, folder)
    entries = page.run(
        "[...document.querySelectorAll('nav button')].map(entry => entry.textContent)"
    )
    assert entries == ["2 × false: cutout 0.51 0.51", "1 × missed: insulator"]
    assert (
        page.run("document.querySelector('#file').textContent")
        == "1 (1).JPG (1 of 5): 2 objects, 1 missed, 2 false"
    )
    assert page.run("location.hash") == "#4", "as report.html links it"
    title = page.run("document.querySelector('.predictions path:nth-of-type(2) title').textContent")
    assert title == "cutout 0.51: false"
    stage = middle_of(page, "#stage")
    shown = (
        ".predictions path:nth-of-type(2)",
        ".predictions path:nth-of-type(3)",
        ".truth path:nth-of-type(2)",
    )
    for selector in shown:
        press(page, "e")
        assert middle_of(page, selector) == pytest.approx(stage, abs=2)
        assert scale_of(page) > 1
    for selector in (*shown[:2], shown[0]):  # a click on an entry shows its errors in turn
        page.run("document.querySelector('nav button').click()")
        assert middle_of(page, selector) == pytest.approx(stage, abs=2)


def test_the_page_lists_results_with_class_and_confidence_and_names_the_command_for_other_tools(
    folder: Path,
) -> None:
    parsed = Elements((folder / PAGE).read_text(encoding="utf-8"))
    assert {"kind", "class", "low", "high", "order"} <= {
        facts.get("id") for _, facts in parsed.found
    }
    (data,) = [json.loads(text) for text in parsed.text if text.startswith('{"results"')]
    assert (data["results"], data["names"]) == (
        ["correct", "missed", "false", "confused"],
        list(CLASSES),
    )
    assert (
        data["command"]
        == "python inference.py --model 'models/a b/best.pt' --source photographs.txt --save-coco"
    )
    shown = {photo["file"]: photo["rows"] for photo in data["photos"]}
    errors = [[*row[:2], *row[3:], row[2]] for row in (*FALSE_ROWS, MISSED_ROW)]
    assert shown["1 (1).JPG"] == [*errors, [0, 0, 80]]
    assert shown["4.jpg"] == []


def test_an_evaluation_removes_the_pictures_of_an_earlier_one(tmp_path: Path) -> None:
    other = tmp_path / "photographs" / "mine.jpg"
    write_photographs(
        tmp_path, {3: made_up_listed("a.jpg", MISSED_ROW)}, {3: made_up_view()}, CLASSES, "best.pt"
    )
    assert (tmp_path / "photographs" / "0.jpg").exists()
    assert (tmp_path / "photographs" / "small" / "3.jpg").exists()
    other.write_bytes(b"not ours")
    write_photographs(tmp_path, {}, {}, CLASSES, "best.pt")
    assert not (tmp_path / PAGE).exists()
    assert [path for path in (tmp_path / "photographs").rglob("*") if path.is_file()] == [other]


def test_outlines_of_a_mask_surround_its_pixels_and_its_holes() -> None:
    mask = np.ones((40, 60), bool)
    mask[10:20, 15:40] = False
    parts = region_outlines(Region(100, 200, mask))
    assert len(parts) == 2
    outer = max(parts, key=lambda part: float(np.ptp(part)))
    assert outer.min(axis=0).tolist() == [100.5, 200.5]
    assert outer.max(axis=0).tolist() == [159.5, 239.5]
