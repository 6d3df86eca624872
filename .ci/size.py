# SPDX-License-Identifier: AGPL-3.0-or-later
"""Print the lines and files of each part of the project beside its budget (`[tool.size]` in pyproject.toml).

Ends with 1 where a part exceeds its budget: a feature then takes its lines from what it makes unnecessary.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent


def measure(part: str, files: list[str]) -> tuple[int, int]:
    """Return the lines and the number of the files in a part: `./` (all), folders, `*.py` in the root, or one file."""
    if part.endswith("/"):
        folders = tuple(folder.removeprefix("./") for folder in part.split())
        own = [file for file in files if file.startswith(folders) and file.endswith(".py")]
    else:
        own = [file for file in files if "/" not in file and Path(file).match(part)]
    return sum(len((PROJECT / file).read_text(encoding="utf-8").splitlines()) for file in own), len(own)


def main() -> int:
    if not (PROJECT / ".git").exists():
        print("Not a git checkout: the sizes are not measured.")
        return 0
    budgets = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["size"]
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=PROJECT,
        check=True,
        capture_output=True,
        text=True,
    )
    files = [file for file in listed.stdout.splitlines() if (PROJECT / file).is_file()]
    exceeded = []
    print(f"{'part':<22}{'lines':>8}{'budget':>8}{'files':>7}{'budget':>8}")
    for part, (most_lines, *most_files) in budgets.items():
        lines, number = measure(part, files)
        print(f"{part:<22}{lines:>8,}{most_lines:>8,}{number:>7}{most_files[0] if most_files else '':>8}")
        if lines > most_lines or (most_files and number > most_files[0]):
            exceeded.append(part)
    if exceeded:
        print(f"Too large: {', '.join(exceeded)}. Make something unnecessary, or give the reason in pyproject.toml.")
    return 1 if exceeded else 0


if __name__ == "__main__":
    sys.exit(main())
