"""The raw folder that most tests of parsing begin with."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sources.parsing.raw_folder import write_raw_folder


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    return write_raw_folder(tmp_path / "raw")
