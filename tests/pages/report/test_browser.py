"""The report in a real browser: no complaint, no request, and every control works."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pages.report.made_up import HOSTILE, made_up_card, made_up_subject
from tests.support.browser import Page
from utils.pages.report import build_page


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
    assert page.run("document.querySelector('#classes .kind-mask tfoot th').textContent") == "all", (
        "the sum stays below"
    )


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
