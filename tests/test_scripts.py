"""The scripts in the root are peers: what two of them need is in `utils/`. `yolo_seg_ddp.py` alone calls two of them."""

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
    files = [*SCRIPTS.values(), *(PROJECT / "utils").rglob("*.py")]
    sources = {file: file.read_text(encoding="utf-8") for file in files}
    assert len(sources) > 100
    named = {
        file: text
        for file, text in sources.items()
        if any(f"import {name}" in text or f"from {name}" in text for name in SCRIPTS)
    }
    found = [
        f"{file.name} imports {name}" for file, text in named.items() for name in imported(text) if name in SCRIPTS
    ]
    assert sorted(found) == [f"yolo_seg_ddp.py imports {name}" for name in ("evaluate_model", "train_yolo_ddp")]
