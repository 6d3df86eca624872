"""The ledger of what was fetched, and data that do not fit it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.sources.download.archives import folder_with, get, get_from_folder, zip_bytes
from tests.support.azure_server import AzureServer
from utils.common.errors import UserError


def test_ledger_records_the_object(server: AzureServer, tmp_path: Path) -> None:
    get(server, tmp_path)
    entry = json.loads((tmp_path / "download.json").read_text())["objects"]["Circuit1.zip"]
    blob = server.blobs["Circuit1.zip"]
    assert entry["url"] == server.url + "Circuit1.zip"
    assert (entry["etag"], entry["md5"], entry["size_bytes"]) == (blob.etag, blob.content_md5(), len(blob.content))
    assert (entry["num_photographs"], entry["max_images"], entry["is_complete"]) == (6, None, True)


def test_other_data_under_the_same_name_is_refused(server: AzureServer, tmp_path: Path) -> None:
    mirror = folder_with(tmp_path, zip_bytes({"1 (1).JPG": b"another photograph"}))
    output = tmp_path / "raw"
    get_from_folder(mirror, output)
    with pytest.raises(UserError, match="use another --output"):
        get(server, output)
    assert (output / "Circuit1" / "1 (1).JPG").read_bytes() == b"another photograph"


def test_same_data_at_another_address_is_accepted(server: AzureServer, tmp_path: Path) -> None:
    get(server, tmp_path)
    with AzureServer() as mirror:
        mirror.blobs = server.blobs
        assert get(mirror, tmp_path).is_unchanged
        assert {request.method for request in mirror.requests} == {"HEAD"}


def test_damaged_ledger_is_named(server: AzureServer, tmp_path: Path) -> None:
    (tmp_path / "download.json").write_text('{"objects": [')
    with pytest.raises(UserError, match=r"download\.json: not readable"):
        get(server, tmp_path)
