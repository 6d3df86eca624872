"""JSON that is read in pieces, and masks as run lengths."""

from __future__ import annotations

import json
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faster_coco_eval.core import mask as coco_mask

from tests.sources.parsing.tool_folder import HEIGHT, WIDTH, brush, hard_masks, run_lengths, whole
from utils.common.errors import UserError
from utils.predict.regions import Region
from utils.sources.parsing import json_stream
from utils.sources.parsing.json_stream import JsonStream
from utils.sources.parsing.run_lengths import RunLengthError, decode_coco, decode_label_studio

# --- A JSON file of any size, read piece by piece --------------------------------------------------------------------


CONTENT: dict[str, Any] = {
    "info": {"a": [1, {"b": None}]},
    "größe": ["ein", {"ä": "ö\u2028", "q": '"}],'}],
    "number": -12345.678e-3,
    "items": [12345, {"x": [1, 2]}, "text", [], {}, True],
    "empty": [],
}


@pytest.mark.parametrize("chunk", [1, 2, 7, 1_000_000])
@pytest.mark.parametrize("form", [{}, {"ensure_ascii": False, "indent": 3}])
def test_chunks_of_any_size_give_what_json_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int, form: dict[str, Any]
) -> None:
    monkeypatch.setattr(json_stream, "CHUNK_BYTES", chunk)
    file = tmp_path / "a.json"
    file.write_bytes(b"\xef\xbb\xbf" * (chunk == 7) + json.dumps(CONTENT, **form).encode())
    data, found = file.read_bytes(), {}
    with closing(JsonStream(file)) as stream:
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
        with closing(JsonStream(tmp_path / "a.json")) as stream:
            for _ in stream.keys():  # noqa: SIM118
                stream.skip()

    with pytest.raises(UserError, match=reason) as caught:
        read()
    assert "\n" not in str(caught.value)


def test_utf_16_gets_the_command_that_converts_it(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"a": 1}', encoding="utf-16")
    with pytest.raises(UserError, match="iconv"):
        JsonStream(tmp_path / "a.json")


def test_one_endless_item_is_refused_before_it_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_stream, "CHUNK_BYTES", 1000)
    monkeypatch.setattr(json_stream, "MAX_ITEM_BYTES", 30_000)
    (tmp_path / "a.json").write_text('["' + "x" * 300_000)
    with pytest.raises(UserError, match="an item of more than"), closing(JsonStream(tmp_path / "a.json")) as stream:
        list(stream.items())


# --- Run lengths of COCO and Label Studio: what others encode is decoded, what is hostile is refused at once ---------


MASKS = hard_masks()


@pytest.mark.parametrize("name", MASKS)
def test_both_of_cocos_encodings_are_decoded(name: str) -> None:
    mask = MASKS[name]
    compressed = coco_mask.encode(np.asfortranarray(mask.astype(np.uint8)))
    text = {"size": [HEIGHT, WIDTH], "counts": compressed["counts"].decode("ascii")}
    for segmentation in (text, run_lengths(mask)):
        bitmap, left, top = decode_coco(segmentation, (WIDTH, HEIGHT))
        assert (whole(Region(left, top, bitmap)) == mask).all()
        assert all(edge.any() for edge in (bitmap[0], bitmap[-1], bitmap[:, 0], bitmap[:, -1]))


@pytest.mark.parametrize("colour", [(0, 0, 0), (255, 255, 255), (10, 200, 30)])
@pytest.mark.parametrize("name", ["parts", "noise"])
def test_label_studios_brush_is_decoded_by_its_alpha(name: str, colour: tuple[int, int, int]) -> None:
    bitmap, left, top = decode_label_studio(brush(MASKS[name], colour), (WIDTH, HEIGHT))
    assert (whole(Region(left, top, bitmap)) == MASKS[name]).all()


@pytest.mark.parametrize(
    ("segmentation", "reason"),
    [
        ({"size": [9, 9], "counts": [81]}, "its `size` is 9x9"),
        ({"size": [HEIGHT, WIDTH], "counts": [5, 10**9]}, "a run of more than"),
        ({"size": [HEIGHT, WIDTH], "counts": [5, -5, HEIGHT * WIDTH]}, "do not add up"),
        ({"size": [HEIGHT, WIDTH], "counts": [5, 5]}, "do not add up"),
        ({"size": [HEIGHT, WIDTH], "counts": [HEIGHT * WIDTH]}, "no pixels"),
        ({"size": [HEIGHT, WIDTH], "counts": [1.5]}, "neither a text nor"),
        ({"size": [HEIGHT, WIDTH], "counts": "o" * 40}, "ends inside a number"),
        ({"size": [HEIGHT, WIDTH], "counts": "o" * 40 + "0"}, "too large"),
        ({"size": [HEIGHT, WIDTH], "counts": "\u00e9"}, "characters"),
        ({"size": [HEIGHT, WIDTH], "counts": ""}, "ends inside"),
        ({"size": [HEIGHT], "counts": "0"}, "`size` is not"),
    ],
)
def test_bad_run_lengths_are_refused(segmentation: dict[str, Any], reason: str) -> None:
    with pytest.raises(RunLengthError, match=reason):
        decode_coco(segmentation, (WIDTH, HEIGHT))


def test_run_lengths_of_gigapixels_take_no_memory() -> None:
    side, start_s = 100_000, time.perf_counter()
    with pytest.raises(RunLengthError, match="400 megapixels"):
        decode_coco({"size": [side, side], "counts": [0, side * side]}, (side, side))
    with pytest.raises(RunLengthError, match="400 megapixels"):
        decode_label_studio([255] * 8, (side, side))
    bomb = [*(4 * 20_000 * 19_000).to_bytes(4, "big"), 0b00111_111, *[0xFF] * 40]
    with pytest.raises(RunLengthError, match="ends too early"):
        decode_label_studio(bomb, (20_000, 19_000))
    assert time.perf_counter() - start_s < 5


@pytest.mark.parametrize("codes", ["text", [300] * 9, [0.5], [], [1, 2, 3], brush(MASKS["hole"])[:-40]])
def test_bad_brushes_are_refused(codes: Any) -> None:
    with pytest.raises(RunLengthError):
        decode_label_studio(codes, (WIDTH, HEIGHT))
