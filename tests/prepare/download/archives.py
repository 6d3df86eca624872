"""Made-up circuits, and how the tests of the download fetch them."""

import io
import random
import zipfile
from pathlib import Path

from tests.support.azure_server import AzureServer, Blob
from yolo_seg_ddp.prepare.download import Report, RetryPolicy, download, open_source

LABELS = "Overhead-Distribution-Labels.csv"
CSV = b"\xef\xbb\xbfLabel,External ID\n\"{'objects': []}\",1 (1).JPG\n"
FAST = RetryPolicy(max_attempts=3, backoff_s=0.001, connect_timeout_s=60, read_timeout_s=60)
PHOTOGRAPH_BYTES = 200_000


def photograph(number: int, size_bytes: int = PHOTOGRAPH_BYTES) -> bytes:
    return random.Random(number).randbytes(size_bytes)


def zip_bytes(
    members: dict[str, bytes], compression: int = zipfile.ZIP_STORED, mode: int = 0
) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in members.items():
            member = zipfile.ZipInfo(name)
            member.compress_type = compression
            member.external_attr = mode << 16
            archive.writestr(member, content)
    return buffer.getvalue()


def circuit(number: int, num_photographs: int, nested: bool = False) -> dict[str, bytes]:
    prefix = f"Circuit{number}/" if nested else ""
    return {
        f"{prefix}{number} ({index}).JPG": photograph(index)
        for index in range(1, num_photographs + 1)
    }


def get(server: AzureServer, output: Path, *circuits: str, **options: object) -> Report:
    source = open_source(server.url, FAST)
    return download(source, output, circuits or ("1",), retry=FAST, **options)  # type: ignore[arg-type]


def folder_with(tmp_path: Path, archive: bytes) -> Path:
    folder = tmp_path / "mirror"
    folder.mkdir()
    (folder / LABELS).write_bytes(CSV)
    (folder / "Circuit1.zip").write_bytes(archive)
    return folder


def get_from_folder(folder: Path, output: Path, **options: object) -> Report:
    return download(open_source(str(folder)), output, ["1"], **options)  # type: ignore[arg-type]


def files_under(folder: Path) -> set[str]:
    return {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}


def add_two_circuits(azure: AzureServer) -> None:
    """Let a server offer the labels, Circuit1 with 6 photographs and Circuit10 with 3."""
    azure.blobs[LABELS] = Blob(CSV)
    azure.blobs["Circuit1.zip"] = Blob(zip_bytes(circuit(1, 6, nested=True)))
    azure.blobs["Circuit10.zip"] = Blob(zip_bytes({**circuit(10, 3), "read me.txt": b"hello"}))
