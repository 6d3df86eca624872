"""The scripts in the root are peers: what two of them need is in `yolo_seg_ddp/`, whose `api.py`
alone calls two of them.
"""

import ast
from collections.abc import Iterator

from tests.support.plugin import PROJECT

SCRIPTS = {file.stem: file for file in PROJECT.glob("*.py")}


def imported(source: str) -> Iterator[str]:
    """Yield the modules that a file imports, at its head or in a function."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (item.name for item in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def test_neither_a_script_nor_a_room_imports_a_script() -> None:
    files = [*SCRIPTS.values(), *(PROJECT / "yolo_seg_ddp").rglob("*.py")]
    files = [file for file in files if "tests" not in file.parts]
    sources = {file: file.read_text(encoding="utf-8") for file in files}
    assert len(sources) > 100
    named = {
        file: text
        for file, text in sources.items()
        if any(
            f"import {name}" in text or f"from {name}" in text or f"scripts.{name}" in text
            for name in SCRIPTS
        )
    }
    found = [
        f"{file.name} imports {name}"
        for file, text in named.items()
        for name in imported(text)
        if name.removeprefix("yolo_seg_ddp.scripts.") in SCRIPTS
    ]
    assert sorted(found) == [
        f"api.py imports yolo_seg_ddp.scripts.{name}"
        for name in ("evaluate_model", "train_yolo_ddp")
    ]
