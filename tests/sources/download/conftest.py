"""A server that behaves like Azure, with two circuits and their labels."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.sources.download.archives import add_two_circuits
from tests.support.azure_server import AzureServer


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[AzureServer]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with AzureServer() as azure:
        add_two_circuits(azure)
        yield azure
