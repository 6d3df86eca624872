"""Turns `--base-url` into a source and `--circuits` into a list."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

from utils.common.errors import UsageError, UserError
from utils.sources.download.source import FolderSource, RetryPolicy
from utils.sources.download.web import HttpSource, Source

DEFAULT_BASE_URL = "https://publicstorageaccnt.blob.core.windows.net/drone-distribution-inspection-imagery/"
CIRCUIT_CANDIDATES = tuple(f"{number}{letter}" for number in range(1, 31) for letter in ("", "a", "b"))


def open_source(base_url: str, retry: RetryPolicy | None = None) -> Source:
    """Open an https address, a file:// address or a local folder. Raises UserError for anything else."""
    parts = urlsplit(base_url)
    if parts.scheme in ("http", "https"):
        return HttpSource(base_url, retry or RetryPolicy())
    if parts.scheme == "file" and parts.hostname in (None, "localhost"):
        return FolderSource(Path(url2pathname(parts.path)))
    if "://" in base_url:
        raise UsageError(f"--base-url {parts.scheme}://…: expected https://host/path, file:///path or a local folder")
    return FolderSource(Path(base_url).expanduser())


def expand_circuits(source: Source, circuits: Sequence[str]) -> list[str]:
    """Check the requested circuits; replace `all` by those that the source has.

    A server cannot be listed without credentials, so it is asked for Circuit1 to Circuit30, each also with a and b.
    """
    names = [circuit.lower() for circuit in circuits]
    for name in names:
        if name != "all" and not re.fullmatch(r"[1-9][0-9]*[a-z]?", name):
            raise UsageError(f"--circuits {name}: expected circuit numbers such as 1, 10 or 13b, or all")
    if "all" not in names:
        return list(dict.fromkeys(names))
    found = source.circuit_names(CIRCUIT_CANDIDATES)
    if not found:
        raise UserError(f"{source.shown()}: no Circuit*.zip there; check --base-url")
    return found
