"""A JSON file of any size, read piece by piece."""

import json
from pathlib import Path
from typing import Any

import pytest

from utils.common.errors import UserError
from utils.sources.parsing import json_stream
from utils.sources.parsing.json_stream import JsonStream

CONTENT: dict[str, Any] = {
    "info": {"a": [1, {"b": None}]},
    "größe": ["ein", {"ä": "ö\u2028", "q": '"}],'}],
    "number": -12345.678e-3,
    "items": [12345, {"x": [1, 2]}, "text", [], {}, True],
    "empty": [],
}


@pytest.mark.parametrize("chunk", [1, 2, 7, 1_000_000])
@pytest.mark.parametrize("form", [{}, {"ensure_ascii": False, "indent": 3}])
def test_chunks_of_any_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int, form: dict[str, Any]) -> None:
    monkeypatch.setattr(json_stream, "CHUNK_BYTES", chunk)
    file = tmp_path / "a.json"
    file.write_bytes(b"\xef\xbb\xbf" * (chunk == 7) + json.dumps(CONTENT, **form).encode())
    data, found = file.read_bytes(), {}
    with JsonStream(file) as stream:
        for key in stream.keys():  # noqa: SIM118 - not a dictionary
            if stream.peek() == "[":
                items = list(stream.items())
                assert all(data[item.start :].startswith(item.data) for item in items)
                found[key] = [json.loads(item.data) for item in items]
            elif key == "info":
                stream.skip()
            else:
                found[key] = json.loads(stream.item().data)
    assert found == {key: value for key, value in CONTENT.items() if key != "info"}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"items": [1,\n2,\n3', "a.json:3: not valid JSON at byte 18"),
        ('{"items": [1 2]}', "expected a comma"),
        ('{"items": [{"a": 1,}]}', "a.json:1"),
        ('{"items" 1}', "expected a colon"),
        ('{"items": [' + "[" * 100_000, "nested too deeply"),
        ('{"items": [' + "9" * 10_000 + "]}", "digits"),
        ("", "expected an object"),
        ("[1]", "expected an object"),
    ],
)
def test_what_is_no_json_is_named_by_line_and_byte(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "a.json").write_text(text)

    def read() -> None:
        with JsonStream(tmp_path / "a.json") as stream:
            for _ in stream.keys():  # noqa: SIM118
                stream.skip()

    with pytest.raises(UserError, match=reason) as caught:
        read()
    assert "\n" not in str(caught.value)


def test_utf_16_gets_the_command_that_converts_it(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"a": 1}', encoding="utf-16")
    with pytest.raises(UserError, match="iconv"):
        JsonStream(tmp_path / "a.json")
