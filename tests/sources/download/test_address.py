"""Addresses and circuits as the command line names them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sources.download.archives import FAST, circuit, zip_bytes
from tests.support.azure_server import AzureServer, Blob
from utils.common.errors import UsageError, UserError
from utils.sources.download import expand_circuits, open_source


def test_all_asks_for_every_known_name(server: AzureServer, tmp_path: Path) -> None:
    server.blobs["Circuit13b.zip"] = Blob(zip_bytes(circuit(13, 1)))
    assert expand_circuits(open_source(server.url, FAST), ["all"]) == ["1", "10", "13b"]
    for name in ("Circuit2.zip", "Circuit10.zip", "Circuit13b.zip", "notes.zip"):
        (tmp_path / name).touch()
    assert expand_circuits(open_source(str(tmp_path)), ["ALL"]) == ["2", "10", "13b"]


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://example.org/x", "use https://example.org"),
        ("ftp://user:hush@example.org/x", "expected https"),
        ("https://", "expected https"),
        ("https://example.org:notaport/", "port"),
        ("/no/such/folder", "no such folder"),
        ("file:///no/such/folder", "no such folder"),
    ],
)
def test_bad_base_url(url: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        open_source(url)
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize("circuit_name", ["", "../1", "1/2", "Circuit1", "0", "13bb", "-1"])
def test_bad_circuit(tmp_path: Path, circuit_name: str) -> None:
    with pytest.raises(UsageError, match="--circuits"):
        expand_circuits(open_source(str(tmp_path)), ["1", circuit_name])
