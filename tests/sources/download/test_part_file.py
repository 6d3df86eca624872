"""Part files that a later run continues, starts again, or finds damaged."""

from __future__ import annotations

from collections import deque
from pathlib import Path

import pytest

from tests.sources.download.archives import get, photograph, zip_bytes
from tests.support.azure_server import AzureServer, Blob
from utils.common.errors import UserError


def test_later_run_continues_a_part_file(server: AzureServer, tmp_path: Path) -> None:
    blob = server.blobs["Circuit1.zip"]
    blob.drop_after = deque([700_000, 0, 0, 0])
    with pytest.raises(UserError, match="run the same command again to continue"):
        get(server, tmp_path)
    kept_bytes = (tmp_path / "Circuit1.zip.part").stat().st_size
    assert kept_bytes == 700_000
    assert not (tmp_path / "Circuit1.zip").exists()
    num_sent = server.bytes_sent("Circuit1.zip")
    get(server, tmp_path)
    assert server.bytes_sent("Circuit1.zip") - num_sent == len(blob.content) - kept_bytes
    assert len(list((tmp_path / "Circuit1").iterdir())) == 6


def test_changed_etag_starts_again(server: AzureServer, tmp_path: Path) -> None:
    blob = server.blobs["Circuit1.zip"]
    blob.drop_after = deque([500_000, 0, 0, 0])
    with pytest.raises(UserError):
        get(server, tmp_path)
    changed = {f"1 ({index}).JPG": photograph(index + 100) for index in range(1, 7)}
    server.blobs["Circuit1.zip"] = Blob(zip_bytes(changed), etag='"0x8D2"')
    num_requests = len(server.gets("Circuit1.zip"))
    get(server, tmp_path)
    assert [request.range for request in server.gets("Circuit1.zip")[num_requests:]] == [""]
    assert (tmp_path / "Circuit1" / "1 (1).JPG").read_bytes() == photograph(101)


def test_part_file_damaged_on_disk_is_found_by_its_md5(server: AzureServer, tmp_path: Path) -> None:
    blob = server.blobs["Circuit1.zip"]
    blob.drop_after = deque([500_000, 0, 0, 0])
    with pytest.raises(UserError):
        get(server, tmp_path)
    (tmp_path / "Circuit1.zip.part").write_bytes(bytes(500_000))
    get(server, tmp_path)
    assert [request.range for request in server.gets("Circuit1.zip")][-1] == ""
    assert (tmp_path / "Circuit1" / "1 (1).JPG").read_bytes() == photograph(1)
