"""The worst photographs at full size: files, outlines, and what keyboard and mouse do in a real browser."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.pages.report.made_up import HOSTILE
from tests.support.browser import Page
from utils.data.images import encode_jpeg
from utils.pages.report.gallery import FALSE, MISSED, RIGHT
from utils.pages.report.photographs import PAGE, FullView, Shape, region_outlines, write_photographs
from utils.predict.regions import Region

SIZE = (3000, 2000)


def made_up_view(file: str, name: str = "conductor") -> FullView:
    x = np.linspace(200, 2800, 150)  # an outline of many points
    upper = np.stack([x, 400 + 500 * (x / 2800) ** 2], axis=1)
    wire = [np.concatenate([upper, upper[::-1] + np.array([0, 6])])]
    insulator = [np.array([(1500.0, 1200.0), (1560.0, 1200.0), (1560.0, 1290.0), (1500.0, 1290.0)])]
    missed = (insulator, [insulator[0] - 300])
    jpeg = encode_jpeg(np.full((SIZE[1], SIZE[0], 3), 120, np.uint8))
    return FullView(
        file,
        SIZE,
        jpeg,
        [Shape(wire, name, RIGHT, ""), *(Shape(part, "insulator", MISSED, "missed") for part in missed)],
        [Shape(wire, name, RIGHT, "", 0.8), Shape([insulator[0] + 400], "cutout", FALSE, "false", 0.51)],
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
    assert page.run(drawn) == [True, True]
    press(page, "p")
    assert page.run(drawn) == [False, True]
    page.run("document.querySelector('#show-truth').click()")
    assert page.run(drawn) == [False, False]
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
    assert entries == ["2 × missed: insulator", "1 × false: cutout"]
    title = page.run("document.querySelector('.predictions path:nth-of-type(2) title').textContent")
    assert title == "cutout 0.51: false"
    stage = middle_of(page, "#stage")
    shown = (".truth path:nth-of-type(2)", ".truth path:nth-of-type(3)", ".predictions path:nth-of-type(2)")
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
