"""Reads a JSON file of any size piece by piece: the items of its large arrays, each with its place in the file."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from utils.common.errors import UserError, printable
from utils.common.files import looks_like_utf_16, other_encoding

CHUNK_BYTES = 1_000_000
# Parsed JSON takes up to 24 times its text in memory (measured: `{},{},`), so one item may take 800 MB.
MAX_ITEM_BYTES = 32_000_000
_ENDS = tuple(" \t\n\r,:]}")
_SPACE = re.compile(r"[ \t\n\r]*")


@dataclass(frozen=True)
class Item:
    """One value of a JSON file, and the bytes `start` to `end` of the file that hold it.

    Texts in `value` are in Latin-1, one character a byte: only numbers and the layout are right. `json.loads` of the
    bytes gives the value itself.
    """

    value: Any
    start: int
    end: int
    data: bytes


class JsonStream:
    """Walks through a UTF-8 JSON file. Memory holds two chunks, or the largest item.

    Use it in a `with` block. All methods raise UserError with file and line where the text is not JSON.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = path.open("rb")
        except OSError as error:
            raise UserError(f"{path}: {error.strerror}") from error
        self._text = ""  # Latin-1, so that a position in it is a position in the file
        self._position = 0
        self._start = 0  # place of the text's first byte in the file
        self._at_end = False
        self._decoder = json.JSONDecoder()

    def __enter__(self) -> JsonStream:
        self._grow(CHUNK_BYTES)
        head = self._text[:4].encode("latin-1")
        if looks_like_utf_16(head):
            self._file.close()
            raise UserError(other_encoding(self.path, head, 0))
        self._position = 3 if head.startswith(b"\xef\xbb\xbf") else 0
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def peek(self) -> str:
        """Return the next character that is no space; an empty string at the end of the file."""
        while True:
            match = _SPACE.match(self._text, self._position)
            self._position = match.end() if match else self._position
            if self._position < len(self._text) or self._at_end:
                return self._text[self._position : self._position + 1]
            self._grow(CHUNK_BYTES)

    def keys(self) -> Iterator[str]:
        """Yield the keys of the object that comes next. Read or skip the value of each before the next key."""
        self._take("{", "an object")
        while self.peek() != "}":
            if self.peek() != '"':
                raise self._error("expected a key")
            key = str(json.loads(self.item().data.decode("utf-8", "replace")))
            self._take(":", "a colon")
            yield key
            if self.peek() != "}":
                self._take(",", "a comma")
        self._position += 1

    def items(self) -> Iterator[Item]:
        """Yield the items of the array that comes next."""
        self._take("[", "an array")
        while self.peek() != "]":
            yield self.item()
            if self.peek() != "]":
                self._take(",", "a comma")
        self._position += 1

    def skip(self) -> None:
        """Pass over the value that comes next; an array of any length."""
        if self.peek() == "[":
            for _ in self.items():
                pass
        else:
            self.item()

    def item(self) -> Item:
        """Read the value that comes next. Raises UserError if it is longer than MAX_ITEM_BYTES."""
        self.peek()
        while True:
            problem = "the file ends here"
            try:
                value, end = self._decoder.raw_decode(self._text, self._position)
                # Without a sign that ends a value, a number may go on in the next chunk.
                if self._at_end or self._text[end : end + 1] in _ENDS:
                    return self._taken(value, end)
            except json.JSONDecodeError as error:
                problem = error.msg
            except RecursionError:
                raise self._error("nested too deeply") from None
            except ValueError as error:  # a number of thousands of digits
                raise self._error(str(error)) from None
            held = len(self._text) - self._position
            if self._at_end:
                raise self._error(problem)
            if held > MAX_ITEM_BYTES:
                raise self._error(f"{problem}, or an item of more than {MAX_ITEM_BYTES // 1_000_000} MB")
            self._grow(max(CHUNK_BYTES, held))

    def _taken(self, value: Any, end: int) -> Item:
        data = self._text[self._position : end].encode("latin-1")
        start = self._start + self._position
        self._position = end
        return Item(value, start, start + len(data), data)

    def _take(self, character: str, what: str) -> None:
        found = self.peek()
        if found != character:
            raise self._error(f"expected {what}, found {printable(found) or 'the end of the file'}")
        self._position += 1

    def _grow(self, num_bytes: int) -> None:
        """Drop the text before the position and read more."""
        more = self._file.read(num_bytes)
        self._start += self._position
        self._text = self._text[self._position :] + more.decode("latin-1")
        self._position = 0
        self._at_end = not more

    def _error(self, reason: str) -> UserError:
        place = self._start + self._position
        line, left = 1, place
        with self.path.open("rb") as file:
            while left > 0 and (chunk := file.read(min(left, CHUNK_BYTES))):
                line += chunk.count(b"\n")
                left -= len(chunk)
        return UserError(
            f"{printable(str(self.path), 400)}:{line}: not valid JSON at byte {place:,} ({printable(reason, 120)}); "
            "export the file again"
        )
