# SPDX-License-Identifier: AGPL-3.0-or-later
"""Print the tokens of each part of the project beside its cap (`[tool.size.tokens]` in
pyproject.toml).

A token is a name, number, text or operator of Python. A docstring is one, an f-string is one, and
so are adjacent texts. What only the formatter adds is none: the comma before a closing bracket, and
parentheses that only group. Comments, blank lines and line breaks are none, so air costs nothing. A
cap leaves 3 % of room above what was there when it was set.

Ends with 1 where a part exceeds its cap, and where a cap is above the one on the main branch or of
the commit before: caps only fall. A part that an issue allows to grow is named in
`[tool.size-raised]` with that reason, until the change has landed.
"""

from __future__ import annotations

import io
import keyword
import subprocess
import sys
import tokenize
import tomllib
from collections.abc import Collection
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parent.parent
EARLIER = ("HEAD~1", "HEAD", "main", "origin/main")


def git(*words: str) -> str:
    """Return what git prints, or nothing if it fails."""
    return subprocess.run(
        ["git", *words], cwd=PROJECT, capture_output=True, text=True, check=False
    ).stdout


def count_tokens(text: str) -> int:
    """Return the number of tokens of Python code; an f-string counts as one in every version of
    Python.
    """
    counted = (tokenize.NAME, tokenize.NUMBER, tokenize.STRING, tokenize.OP)
    number = depth = 0
    last = ""
    is_call: list[bool] = []  # of each open parenthesis
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        # Python 3.12 splits an f-string into its parts.
        kind = tokenize.tok_name[token.type].replace("FSTRING_END", "STRING")
        depth -= kind != tokenize.tok_name[token.type]
        if depth == 0 and (token.type in counted or kind == "STRING"):
            number += not last == kind == "STRING"
            number -= last == "," and token.string in ("]", "}", ")")
            if token.string == "(":
                is_name = last.isidentifier() and not keyword.iskeyword(last)
                is_call.append(is_name or last in ("]", ")"))
                number -= not is_call[-1]
            elif token.string == ")":
                number -= not is_call.pop()
            last = "STRING" if kind == "STRING" else token.string
        depth += kind == "FSTRING_START"
    return number


def measure(part: str, files: list[str], parts: Collection[str]) -> int:
    """Return the tokens of the Python files in a part, which is `./` (all), folders, or `*.py` in
    the root.

    A folder is counted without those in it that are other `parts`. Of a page (`README.md`): its
    words.
    """
    if part.endswith(".md"):
        return len((PROJECT / part).read_text(encoding="utf-8").split())
    if part.endswith("/"):
        folders = tuple(folder.removeprefix("./") for folder in part.split())
        apart = tuple(
            each for each in parts if part not in ("./", each) and each.startswith(folders)
        )
        chosen = [file for file in files if file.startswith(folders) and not file.startswith(apart)]
        chosen = [file for file in chosen if file.endswith(".py")]
    else:
        chosen = [file for file in files if "/" not in file and Path(file).match(part)]
    return sum(count_tokens((PROJECT / file).read_text(encoding="utf-8")) for file in chosen)


def rises(tool: dict[str, Any], before: dict[str, Any]) -> list[str]:
    """Return the parts whose cap is above an earlier one, without those that an issue allows to
    grow.
    """
    old = before.get("size", {}).get("tokens", {})
    return [
        part
        for part, cap in tool["size"]["tokens"].items()
        if part not in tool.get("size-raised", {}) and cap > old.get(part, cap)
    ]


def main() -> int:
    if not (PROJECT / ".git").exists():
        print("Not a git checkout: the sizes are not measured.")
        return 0
    tool = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    listed = git("ls-files", "--cached", "--others", "--exclude-standard").splitlines()
    files = [file for file in listed if (PROJECT / file).is_file()]
    exceeded = []
    print(f"{'part':<22}{'tokens':>9}{'cap':>9}")
    for part, cap in tool["size"]["tokens"].items():
        tokens = measure(part, files, tool["size"]["tokens"])
        print(f"{part:<22}{tokens:>9,}{cap:>9,}")
        if tokens > cap:
            exceeded.append(part)
    if exceeded:
        print(f"Too large: {', '.join(exceeded)}. Make something unnecessary.")
    revisions = [tomllib.loads(git("show", f"{revision}:pyproject.toml")) for revision in EARLIER]
    risen = sorted({part for old in revisions if old for part in rises(tool, old["tool"])})
    if risen:
        print(
            f"A cap only falls: {', '.join(risen)}. It may rise where an issue says so: name it "
            "in [tool.size-raised]."
        )
    return 1 if exceeded or risen else 0


if __name__ == "__main__":
    sys.exit(main())
