"""One browser for all tests of pages."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.browser import CHROMIUM, Page, browser_page


@pytest.fixture(scope="package")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    if CHROMIUM is None:
        pytest.skip("needs Chromium (apt-get install chromium)")
    with browser_page(tmp_path_factory.mktemp("profile")) as found:
        yield found
