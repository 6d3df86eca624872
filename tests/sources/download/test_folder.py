"""A local folder as the source."""

from __future__ import annotations

from pathlib import Path

from tests.sources.download.archives import (
    LABELS,
    circuit,
    files_under,
    folder_with,
    get_from_folder,
    photograph,
    zip_bytes,
)
from utils.sources.download import download, open_source


def test_folder_and_file_url_give_the_same(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, zip_bytes(circuit(1, 4, nested=True)))
    get_from_folder(folder, tmp_path / "raw")
    download(open_source(folder.as_uri()), tmp_path / "raw2", ["1"], keep_zips=True)
    assert files_under(tmp_path / "raw2") - files_under(tmp_path / "raw") == {"Circuit1.zip"}
    assert (tmp_path / "raw" / "Circuit1" / "1 (4).JPG").read_bytes() == photograph(4)
    assert get_from_folder(folder, tmp_path / "raw").is_unchanged


def test_folder_may_be_the_output_itself(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, zip_bytes(circuit(1, 4)))
    get_from_folder(folder, folder)
    assert {LABELS, "Circuit1.zip", "Circuit1/1 (1).JPG"} <= files_under(folder)
