"""Reads a JSON file of any size in pieces: the items of its large arrays, each with its place in the file.

The library `ijson` does not tell places in the file, and it stops at NaN, at a number of 400 digits and at a byte that is not
UTF-8.
"""

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from utils.common.errors import UserError, printable
from utils.common.files import looks_like_utf_16, open_regular, other_encoding, shallow
from utils.sources.parsing.rows import SPAN, digest_of

CHUNK_BYTES = 1_000_000
# Parsed JSON takes up to 24 times its text in memory (measured: `{},{},`), so one item may take 800 MB.
MAX_ITEM_BYTES = 32_000_000
_ENDS = tuple(" \t\n\r,:]}")
_SPACE = re.compile(r"[ \t\n\r]*")


@dataclass(frozen=True)
class Item:
    """One value of a JSON file, and its bytes, which begin at `start` in the file.

    Texts in `raw` are decoded as Latin-1, a character for each byte: only its numbers and its structure are right.
    """

    raw: Any
    start: int
    data: bytes

    @property
    def span(self) -> bytes:
        """The place in the file in the form of AnnotationRow.spans."""
        return SPAN.pack(self.start, self.start + len(self.data), digest_of(self.data))

    def value(self) -> Any:
        """Return the value with correct texts; bytes that are not UTF-8 become U+FFFD."""
        return json.loads(self.data.decode("utf-8", "replace"))


class JsonStream(ExitStack):
    """Walks through a UTF-8 JSON file. Memory holds two chunks, or the largest item. A context manager.

    All methods raise UserError with file and line where the text is not JSON.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        try:
            self._file = self.enter_context(open_regular(path))
            head = self._file.read(4)
        except OSError as error:
            raise UserError(f"{path}: {error.strerror}") from error
        if looks_like_utf_16(head):
            self.close()
            raise UserError(other_encoding(path, head, 0))
        self._start = 3 if head.startswith(b"\xef\xbb\xbf") else 0  # place of the text's first byte in the file
        self._file.seek(self._start)
        self._text = ""  # Latin-1, so that a position in it is a position in the file
        self._position = 0
        self._at_end = False
        self._decoder = json.JSONDecoder()

    def peek(self) -> str:
        """Return the next character that is no space; an empty string at the end of the file."""
        while True:
            match = _SPACE.match(self._text, self._position)
            self._position = match.end() if match else self._position
            if self._position < len(self._text) or self._at_end:
                return self._text[self._position : self._position + 1]
            self._grow(CHUNK_BYTES)

    def keys(self) -> Iterator[str]:
        """Yield the keys of the object that comes next. Read the value of each, or `skip` it, before the next key."""
        for _ in self._separated("{", "}", "an object"):
            if self.peek() != '"':
                raise self._error("expected a key")
            key = str(self.item().value())
            self._take(":", "a colon")
            yield key

    def items(self) -> Iterator[Item]:
        """Yield the items of the array that comes next."""
        for _ in self._separated("[", "]", "an array"):
            yield self.item()

    def skip(self) -> None:
        """Pass over the value that comes next; an array of any length."""
        for _ in self.items() if self.peek() == "[" else [self.item()]:
            pass

    def item(self) -> Item:
        """Read the value that comes next. Raises UserError if it is longer than MAX_ITEM_BYTES."""
        self.peek()
        while True:
            problem = "the file ends here"
            try:
                value, end = self._decoder.raw_decode(self._text, self._position)
                # Without a character that ends a value, a number may continue in the next chunk.
                if self._at_end or self._text[end : end + 1] in _ENDS:
                    shallow(value)
                    data = self._text[self._position : end].encode("latin-1")
                    item = Item(value, self._start + self._position, data)
                    self._position = end
                    return item
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

    def _separated(self, first: str, last: str, what: str) -> Iterator[None]:
        self._take(first, what)
        while self.peek() != last:
            yield
            if self.peek() != last:
                self._take(",", "a comma")
        self._position += 1

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
