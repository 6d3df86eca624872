# SPDX-License-Identifier: AGPL-3.0-or-later
"""Print the lines and files of each part of the project beside its cap (`[tool.size]` in pyproject.toml).

Ends with 1 where a part exceeds its cap, and where a cap is above the one on the main branch or of the commit before: caps only
fall. A part that an issue allows to grow is named in `[tool.size-raised]` with that reason, until the change has landed.
"""

from __future__ import annotations

import operator
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parent.parent
EARLIER = ("HEAD~1", "HEAD", "main", "origin/main")


def git(*words: str) -> str:
    """Return what git prints, or nothing if it fails."""
    return subprocess.run(["git", *words], cwd=PROJECT, capture_output=True, text=True, check=False).stdout


def measure(part: str, files: list[str]) -> tuple[int, int]:
    """Return the lines and the number of the files in a part: `./` (all), folders, `*.py` in the root, or one file."""
    if part.endswith("/"):
        folders = tuple(folder.removeprefix("./") for folder in part.split())
        own = [file for file in files if file.startswith(folders) and file.endswith(".py")]
    else:
        own = [file for file in files if "/" not in file and Path(file).match(part)]
    return sum(len((PROJECT / file).read_text(encoding="utf-8").splitlines()) for file in own), len(own)


def rises(tool: dict[str, Any], before: dict[str, Any]) -> list[str]:
    """Return the parts whose cap is above an earlier one, without those that an issue allows to grow."""
    old = before.get("size", {})
    return [
        part
        for part, caps in tool["size"].items()
        if part not in tool.get("size-raised", {}) and any(map(operator.gt, caps, old.get(part, caps)))
    ]


def main() -> int:
    if not (PROJECT / ".git").exists():
        print("Not a git checkout: the sizes are not measured.")
        return 0
    tool = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    listed = git("ls-files", "--cached", "--others", "--exclude-standard").splitlines()
    files = [file for file in listed if (PROJECT / file).is_file()]
    exceeded = []
    print(f"{'part':<22}{'lines':>8}{'cap':>8}{'files':>7}{'cap':>8}")
    for part, (most_lines, *most_files) in tool["size"].items():
        lines, number = measure(part, files)
        print(f"{part:<22}{lines:>8,}{most_lines:>8,}{number:>7}{most_files[0] if most_files else '':>8}")
        if lines > most_lines or (most_files and number > most_files[0]):
            exceeded.append(part)
    if exceeded:
        print(f"Too large: {', '.join(exceeded)}. Make something unnecessary.")
    revisions = [tomllib.loads(git("show", f"{revision}:pyproject.toml")) for revision in EARLIER]
    risen = sorted({part for old in revisions if old for part in rises(tool, old["tool"])})
    if risen:
        print(
            f"A cap only falls: {', '.join(risen)}. It may rise where an issue says so: name it in [tool.size-raised]."
        )
    return 1 if exceeded or risen else 0


if __name__ == "__main__":
    sys.exit(main())
