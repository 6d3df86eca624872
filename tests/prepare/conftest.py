"""A raw folder for the tests of parsing, and for those of the download a server like Azure with two
circuits.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.prepare.download.archives import add_two_circuits
from tests.prepare.parsing.raw_folder import write_raw_folder
from tests.support.azure_server import AzureServer


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    return write_raw_folder(tmp_path / "raw")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[AzureServer]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with AzureServer() as azure:
        add_two_circuits(azure)
        yield azure
