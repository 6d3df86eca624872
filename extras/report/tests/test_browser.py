"""The report and its photographs at full size in a real browser: no complaint, no request, and every control works."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from extras.report.gallery import FALSE, MISSED, RIGHT
from extras.report.page import build_page
from extras.report.photographs import PAGE, FullView, Shape, region_outlines, write_photographs
from extras.report.tests.made_up import HOSTILE, made_up_card, made_up_subject
from tests.support.browser import CHROMIUM, Page, browser_page
from utils.data.images import encode_jpeg
from utils.predict.regions import Region


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


def test_the_browser_does_report_what_it_refuses(page: Page, reports: dict[str, Path], tmp_path: Path) -> None:
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
    column = "[...document.querySelectorAll('#classes .kind-mask tbody tr')].map(row => row.cells[1].dataset.value)"
    heading = "document.querySelectorAll('#classes .kind-mask thead th')[1]"
    before = [float(value) for value in page.run(column)]
    assert before not in (sorted(before), sorted(before, reverse=True)), "they are in order already"
    page.run(f"{heading}.querySelector('button').click()")
    assert [float(value) for value in page.run(column)] == sorted(before, reverse=True)
    assert page.run(f"{heading}.getAttribute('aria-sort')") == "descending"
    page.run(f"{heading}.querySelector('button').click()")
    assert [float(value) for value in page.run(column)] == sorted(before)
    page.run("document.querySelector('#classes .kind-mask thead button').click()")
    names = page.run("[...document.querySelectorAll('#classes .kind-mask tbody th')].map(cell => cell.textContent)")
    assert names == sorted(names)
    assert page.run(f"{heading}.getAttribute('aria-sort')") is None
    below = page.run("document.querySelector('#classes .kind-mask tfoot th').textContent")
    assert below == "all", "the sum stays there"


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


def test_the_pointer_over_a_curve_shows_the_value_of_the_curve_there(page: Page, reports: dict[str, Path]) -> None:
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


# --- the worst photographs at full size: what keyboard and mouse do, outlines and files ------------------------------

SIZE = (3000, 2000)


def made_up_view(file: str, name: str = "conductor") -> FullView:
    x = np.linspace(200, 2800, 150)  # an outline of many points
    upper = np.stack([x, 400 + 500 * (x / 2800) ** 2], axis=1)
    wire = [np.concatenate([upper, upper[::-1] + np.array([0, 6])])]
    insulator = [np.array([(1500.0, 1200.0), (1560.0, 1200.0), (1560.0, 1290.0), (1500.0, 1290.0)])]
    false = (insulator[0] + 400, insulator[0] - 300)
    jpeg = encode_jpeg(np.full((SIZE[1], SIZE[0], 3), 120, np.uint8))
    return FullView(
        file,
        SIZE,
        jpeg,
        [Shape(wire, name, RIGHT, ""), Shape(insulator, "insulator", MISSED, "missed")],
        [Shape(wire, name, RIGHT, "", 0.8), *(Shape([part], "cutout", FALSE, "false", 0.51) for part in false)],
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evaluation")
    write_photographs(folder, [made_up_view("1 (1).JPG"), made_up_view(HOSTILE[0], HOSTILE[1])])
    return folder


def scale_of(page: Page) -> float:
    """Return how many pixels of the screen show one of the photograph."""
    return float(page.run("document.querySelector('.world:not([hidden])').getBoundingClientRect().width")) / SIZE[0]


def press(page: Page, key: str) -> None:
    for kind in ("keyDown", "keyUp"):
        page.call("Input.dispatchKeyEvent", type=kind, key=key)


def middle_of(page: Page, selector: str) -> tuple[float, float]:
    x, y = page.run(
        f"(() => {{ const box = document.querySelector({selector!r}).getBoundingClientRect();"
        " return [box.left + box.width / 2, box.top + box.height / 2] })()"
    )
    return x, y


def test_a_browser_shows_the_photograph_without_a_complaint(page: Page, folder: Path) -> None:
    page.complaints.clear()
    page.requests.clear()
    for width_px in (500, 1400):
        page.open(folder / PAGE, width_px)
        loaded = "document.images[0].decode().then(() => document.images[0].naturalWidth)"
        assert page.run(loaded) == SIZE[0]
        assert page.run("document.documentElement.scrollWidth") <= width_px, "the page scrolls sideways"
        assert page.run("document.querySelector('nav').scrollWidth <= document.querySelector('nav').clientWidth")
        frame = page.run("document.querySelector('#stage').getBoundingClientRect().toJSON()")
        shown = page.run("document.querySelector('.world').getBoundingClientRect().toJSON()")
        assert shown["left"] >= frame["left"] - 1
        assert shown["right"] <= frame["right"] + 1
        assert shown["bottom"] <= frame["bottom"] + 1
    assert page.run("document.title") == "Photographs at full size", "a name has run as a script"
    assert not page.run("document.images[1].src"), "the second is loaded only when it is shown"
    press(page, "n")
    assert page.run("document.images[1].decode().then(() => document.images[1].naturalWidth)") == SIZE[0]
    assert page.complaints == []
    assert all(url.startswith(("file:", "data:")) for url in page.requests), page.requests


def test_keys_and_buttons_zoom_move_and_toggle(page: Page, folder: Path) -> None:
    page.open(folder / PAGE, 1400)
    whole = scale_of(page)
    press(page, "+")
    assert scale_of(page) == pytest.approx(1.5 * whole, rel=1e-3)
    press(page, "1")
    assert scale_of(page) == pytest.approx(1, rel=1e-3)
    left = middle_of(page, ".world")[0]
    press(page, "ArrowRight")
    assert middle_of(page, ".world")[0] == pytest.approx(left - 80)
    press(page, "0")
    assert scale_of(page) == pytest.approx(whole, rel=1e-3)
    drawn = "[...document.querySelectorAll('.world:not([hidden]) g')].map(one => one.getBoundingClientRect().width > 0)"
    assert page.run(drawn) == [True] * 4, "predictions and labels, each above its edges"
    press(page, "p")
    assert page.run(drawn) == [False, False, True, True]
    page.run("document.querySelector('#show-truth').click()")
    assert page.run(drawn) == [False] * 4
    assert page.run("document.querySelector('#show-predictions').checked") is False


def test_the_wheel_keeps_the_point_under_the_pointer_and_dragging_moves_it(page: Page, folder: Path) -> None:
    page.open(folder / PAGE, 1400)
    point = "(() => { const box = document.querySelector('.world').getBoundingClientRect(); return [(300 - box.left) / box.width, (500 - box.top) / box.height] })()"
    before, whole = page.run(point), scale_of(page)
    page.call("Input.dispatchMouseEvent", type="mouseWheel", x=300, y=500, deltaX=0, deltaY=-400)
    assert scale_of(page) > 1.5 * whole
    assert page.run(point) == pytest.approx(before, abs=1e-3)
    corner = page.run("document.querySelector('.world').getBoundingClientRect().left")
    for kind, x in (("mousePressed", 300), ("mouseMoved", 350), ("mouseReleased", 350)):
        page.call("Input.dispatchMouseEvent", type=kind, x=x, y=500, button="left", buttons=1, clickCount=1)
    moved = page.run("document.querySelector('.world').getBoundingClientRect().left")
    assert moved == pytest.approx(corner + 50, abs=1)


def test_the_next_error_is_brought_to_the_middle(page: Page, folder: Path) -> None:
    page.open(folder / PAGE, 1400)
    entries = page.run("[...document.querySelectorAll('nav ol:not([hidden]) button')].map(entry => entry.textContent)")
    assert entries == ["2 × false: cutout", "1 × missed: insulator"]
    assert page.run("document.querySelector('#photo').selectedOptions[0].text") == "1 (1).JPG: 3 errors"
    title = page.run("document.querySelector('.predictions path:nth-of-type(2) title').textContent")
    assert title == "cutout 0.51: false"
    stage = middle_of(page, "#stage")
    shown = (".predictions path:nth-of-type(2)", ".predictions path:nth-of-type(3)", ".truth path:nth-of-type(2)")
    for selector in shown:
        press(page, "e")
        assert middle_of(page, selector) == pytest.approx(stage, abs=2)
        assert scale_of(page) > 1
    for selector in (*shown[:2], shown[0]):  # a click on an entry shows its errors in turn
        page.run("document.querySelector('nav ol:not([hidden]) button').click()")
        assert middle_of(page, selector) == pytest.approx(stage, abs=2)


def test_an_evaluation_without_large_photographs_removes_an_earlier_ones(tmp_path: Path) -> None:
    other = tmp_path / "photographs" / "mine.jpg"
    write_photographs(tmp_path, [made_up_view("a.jpg")])
    assert (tmp_path / "photographs" / "0.jpg").exists()
    other.write_bytes(b"not ours")
    write_photographs(tmp_path, [])
    assert not (tmp_path / PAGE).exists()
    assert list((tmp_path / "photographs").iterdir()) == [other]


def test_outlines_of_a_mask_surround_its_pixels_and_its_holes() -> None:
    mask = np.ones((40, 60), bool)
    mask[10:20, 15:40] = False
    parts = region_outlines(Region(100, 200, mask))
    assert len(parts) == 2
    outer = max(parts, key=lambda part: float(np.ptp(part)))
    assert outer.min(axis=0).tolist() == [100.5, 200.5]
    assert outer.max(axis=0).tolist() == [159.5, 239.5]
