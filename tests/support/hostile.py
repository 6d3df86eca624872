"""Hostile files for the security tests: pickles that would leave a mark, as .pt files of every
shape.
"""

import builtins
import io
import os
import pickle
import random
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


class Call:
    """Unpickles as `function(*arguments)`."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.function, self.arguments


class PersistentId:
    """Pickled in `hostile_storage` as a persistent id, where a checkpoint names its storages."""

    def __init__(self, content: Any) -> None:
        self.content = content


class _Pickler(pickle.Pickler):
    def persistent_id(self, item: Any) -> Any:
        return item.content if isinstance(item, PersistentId) else None


def zipped(data_pkl: bytes | None) -> bytes:
    """Return a file laid out as torch.save does, around a pickle of ours."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive:
        if data_pkl is not None:
            archive.writestr("archive/data.pkl", data_pkl)
        archive.writestr("archive/version", "3\n")
        archive.writestr("archive/byteorder", "little")
        archive.writestr("archive/data/0", bytes(64))
    return stream.getvalue()


def saved(content: Any, **options: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(content, stream, **options)
    return stream.getvalue()


def hostile_weights(marker: Path) -> dict[str, bytes]:
    """Return .pt files by name; all but `no_data_pkl` create `marker` when they are opened without
    care.
    """
    touch = f"touch '{marker}'"
    code = f"open({str(marker)!r}, 'w').close()"
    through_storage = io.BytesIO()
    pickler = _Pickler(through_storage, protocol=2)
    pickler.dump(
        OrderedDict(weight=PersistentId(("storage", Call(os.system, touch), "0", "cpu", 4)))
    )
    return {
        "os_system": saved({"model": Call(os.system, touch)}),
        "eval_through_getattr": saved(
            {"model": Call(getattr, Call(builtins.eval, f"({code}, [])[1]"), "append")}
        ),
        "nested_pickle": saved({"model": Call(pickle.loads, pickle.dumps(Call(os.system, touch)))}),
        "deep_in_a_dictionary": saved(
            {"model": OrderedDict(a={"b": [{"c": Call(os.system, touch)}]})}
        ),
        "persistent_id": zipped(through_storage.getvalue()),
        "no_data_pkl": zipped(None),
        "legacy": saved({"model": Call(os.system, touch)}, _use_new_zipfile_serialization=False),
    }


def hostile_cells(marker: Path) -> dict[str, str]:
    """Return `Label` fields by name.

    Those that are code would create `marker` if they were evaluated.
    """
    touch = f"open({str(marker)!r}, 'w')"
    point = '{"x": 1, "y": 2}'
    zigzag = ", ".join(
        f'{{"x": {number % 4000}, "y": {100 + number % 2 * 3}}}' for number in range(20_000)
    )
    generator = random.Random(0)
    scribble = ", ".join(
        f'{{"x": {generator.randrange(4000)}, "y": {generator.randrange(3000)}}}'
        for _ in range(4_000)
    )
    return {
        "import": f"__import__('os').system('touch {marker}')",
        "call": touch,
        "lambda": f"(lambda: {touch})()",
        "comprehension": f"[{touch} for _ in [1]]",
        "f_string": f"{{'objects': [f'{{{touch}}}']}}",
        "attribute": "{'objects': ().__class__.__bases__[0].__subclasses__()}",
        "walrus": f"(x := {touch})",
        "power": "9**9**9",
        "repetition": "{'objects': ['a' * 9999999999]}",
        "20_mb": '{"objects": [' + " " * 20_000_000 + "]}",
        "100000_brackets": "[" * 100_000,
        "100000_closed_brackets": "[" * 100_000 + "]" * 100_000,
        "deep_dictionaries": '{"objects": ' + '{"a": ' * 50_000 + "1" + "}" * 50_001,
        "as_deep_as_json_goes": '{"objects": [' + "[" * 900 + "]" * 900 + "]}",
        "million_lists": "{'objects': [" + "[], " * 900_000 + "]}",
        "million_small_lists": '{"objects": [' + "[], " * 900_000 + "[]]}",
        "nan": f'{{"objects": [{{"value": "pole", "polygon": [{point}, {{"x": NaN, "y": 1}}, '
        f"{point}]}}]}}",
        "1e999": f'{{"objects": [{{"value": "pole", "polygon": [{point}, {{"x": 1e999, "y": '
        "-1e999}]}]}",
        "huge_integer": "9" * 100_000,
        "unbalanced": '{"objects": [{"value": "pole"',
        "bytes": "b'\\x00\\xff'",
        "nul": "{'objects': []\0}",
        "zigzag_line": f'{{"objects": [{{"value": "conductor", "line": [{zigzag}]}}]}}',
        "scribble": f'{{"objects": [{{"value": "pole", "polygon": [{scribble}]}}]}}',
    }
