"""Reads .pt files in Ultralytics' format without running any code that they contain.

Such a file is a pickle. The usual reader runs any code in it, and even a restricted reader builds
layers with arguments that the file chooses. Here every class in the file becomes an empty shell.
Only tensors, class names and the network's description are taken from the shells; the description
is checked before a network is built from it.
"""

from __future__ import annotations

import pickle
import re
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from yolo_seg_ddp.utils.errors import UserError, one_line
from yolo_seg_ddp.utils.zips import BoundedZip

MODEL_CLASS = "ultralytics.nn.tasks.SegmentationModel"
# The names in Ultralytics' files besides tensors: layers and settings of the training.
KNOWN_GLOBALS = re.compile(
    r"(torch\.nn\.modules|ultralytics\.nn\.modules|ultralytics\.nn\.tasks)(\.\w+)+"
    r"|ultralytics\.(yolo\.)?utils(\.(loss|tal|__init__))?\.\w+"
    r"|numpy\.(dtype|(_core|core)\.multiarray\.scalar|dtypes\.\w+)"
    r"|pathlib\.(_local\.)?(Posix|Windows)Path"
    r"|builtins\.getattr"  # becomes a shell too, so it reads nothing
)
MAX_NAMES = 10_000
MAX_LAYERS, MAX_REPEATS, MAX_LAYER_NUMBER = 1000, 100, 100_000
MAX_DESCRIPTION_ITEMS = 20_000
MAX_DEPTH = 50  # of modules within modules; YOLO's reach 8
NETWORK_KEYS = (
    "nc",
    "scales",
    "scale",
    "depth_multiple",
    "width_multiple",
    "backbone",
    "head",
    "reg_max",
    "end2end",
)
LAYER_NAME = re.compile(r"(nn\.)?[A-Za-z][A-Za-z0-9_]*")
# a call of one of nn's names
ACTIVATION = re.compile(r"(torch\.)?nn\.[A-Za-z0-9]+\([\w\s.,=+-]*\)")
FETCHES_WEIGHTS = ("TorchVision",)  # a layer that would download its weights
TO_CONVERT = (
    'only if you trust the file: python -c "from ultralytics import YOLO; '
    "YOLO('FILE').save('converted.pt')\""
)


@dataclass(frozen=True)
class WeightsFile:
    """The content of a .pt file: the checked network description, class names, tensors and training
    options.
    """

    architecture: dict[str, Any]
    names: tuple[str, ...]
    state: dict[str, torch.Tensor]
    options: dict[str, Any]


class ForeignFile(ValueError):
    """The file is not accepted. The message gives the reason and, if there is one, the fix."""


class _Shell:
    """Replaces a class of a .pt file: accepts any arguments, keeps the state, does nothing."""

    content: dict[str, Any]

    def __new__(cls, *_: Any, **__: Any) -> _Shell:
        shell = super().__new__(cls)
        shell.content = {}
        return shell

    def __setstate__(self, state: Any) -> None:
        self.content = state if isinstance(state, dict) else {}


def read_weights_file(path: Path) -> WeightsFile:
    """Read a segmentation model's file.

    Raises UserError: one line with the file, the problem and the fix.
    """
    try:
        return _read(path)
    except ForeignFile as error:
        raise UserError(f"{path}: {error}") from error
    except Exception as error:  # whatever is wrong with the file, the user gets one line
        raise UserError(f"{path}: not a model this trainer can open ({one_line(error)})") from error


def _read(path: Path) -> WeightsFile:
    _check_container(path)
    with _shells_for(path) as shells:
        content = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(content, dict):
        raise ForeignFile(
            f"holds {type(content).__name__}, not a segmentation model; use a *-seg.pt file"
        )
    model = content.get("ema") or content.get("model")
    wanted = shells.get(MODEL_CLASS)
    if wanted is None or not isinstance(model, wanted):
        raise ForeignFile(_not_a_model(content, model))
    names = checked_names(model.content.get("names"))
    architecture = checked_architecture(model.content.get("yaml"))
    options = _plain_options(model.content.get("args"))
    return WeightsFile(architecture, names, dict(_tensors(model, "", 0)), options)


def _not_a_model(content: dict[Any, Any], model: Any) -> str:
    if isinstance(model, _Shell):
        return f"holds {type(model).__name__}, not a segmentation model; use a *-seg.pt file"
    if "progress" in content and "optimizer" in content:
        return (
            "is the state of a run to resume, not a segmentation model; use best.pt or last.pt of "
            "the run's folder"
        )
    return (
        "holds tensors alone, not a segmentation model; to convert it load them into a model and "
        "save that: "
        "m = YOLO('yolov8n-seg.yaml'); m.model.load_state_dict(torch.load(file, "
        "weights_only=True)); m.save('converted.pt')"
    )


def _check_container(path: Path) -> None:
    """Raise ForeignFile unless the file has the layout of `torch.save`: uncompressed records, one
    of them a pickle.
    """
    if not path.is_file():
        raise ForeignFile("not a file")
    if not zipfile.is_zipfile(path):
        raise ForeignFile(
            "damaged, or saved in PyTorch's format of before 2020; to convert the latter: "
            "torch.save(torch.load(old, weights_only=True), new)"
        )
    with BoundedZip(path) as archive:
        members = archive.infolist()
    records = {member.filename.rpartition("/")[2] for member in members}
    if "constants.pkl" in records:
        raise ForeignFile("is a TorchScript export; use the best.pt or last.pt that it was made of")
    if any(member.compress_type != zipfile.ZIP_STORED for member in members):
        raise ForeignFile("has compressed records, which torch.save never writes; not opened")
    if sum(member.file_size for member in members) > path.stat().st_size:
        raise ForeignFile("claims to hold more than its own size; not opened")
    if "data.pkl" not in records:
        raise ForeignFile("holds no data.pkl, so it is not a model; use a *-seg.pt file")


@contextmanager
def _shells_for(path: Path) -> Iterator[dict[str, type[_Shell]]]:
    """Make torch.load unpickle every class of the file as a shell. Raises ForeignFile for names
    that no YOLO file needs.

    Classes that other code in this process declared safe are not safe meanwhile.
    """
    allowed_before = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    try:
        needed = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        foreign = sorted(name for name in needed if not KNOWN_GLOBALS.fullmatch(name))
        if foreign:
            if any(name.startswith(("models.", "yolov5.")) for name in foreign):
                raise ForeignFile(
                    "is a model of YOLOv5 or of a program made from it, whose layers neither this "
                    "trainer nor Ultralytics has; train "
                    "one again from yolov8n-seg.pt or yolo11n-seg.pt"
                )
            named = ", ".join(ascii(name)[1:-1][:60] for name in foreign[:3])
            raise ForeignFile(f"names {named}, which could run code; not opened ({TO_CONVERT})")
        shells = {name: type(name.rpartition(".")[2], (_Shell,), {}) for name in needed}
        torch.serialization.add_safe_globals([(shell, name) for name, shell in shells.items()])
        yield shells
    except pickle.UnpicklingError as error:
        raise ForeignFile(f"not a model this trainer can open ({one_line(error)})") from error
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(allowed_before)


def _tensors(module: Any, prefix: str, depth: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a shell's parameters and buffers under the names in the real module's state_dict."""
    if not isinstance(module, _Shell):
        return  # a submodule that was set to None
    if depth > MAX_DEPTH:
        raise ForeignFile(f"has modules nested deeper than {MAX_DEPTH}; not opened")
    unsaved = module.content.get("_non_persistent_buffers_set") or ()
    for kind in ("_parameters", "_buffers"):
        for name, tensor in (module.content.get(kind) or {}).items():
            if isinstance(tensor, torch.Tensor) and name not in unsaved:
                yield f"{prefix}{name}", tensor.detach()
    for name, child in (module.content.get("_modules") or {}).items():
        yield from _tensors(child, f"{prefix}{name}.", depth + 1)


def checked_names(names: Any) -> tuple[str, ...]:
    """Return class names in order.

    Raises ForeignFile unless they are printable and numbered without gaps.
    """
    numbered = names if isinstance(names, dict) else dict(enumerate(names or ()))
    if not 1 <= len(numbered) <= MAX_NAMES or set(numbered) != set(range(len(numbered))):
        raise ForeignFile(f"its class names are not numbered 0 to {max(len(numbered) - 1, 0)}")
    for name in numbered.values():
        if (
            not isinstance(name, str | int | float)
            or not str(name).isprintable()
            or len(str(name)) > 200
        ):
            shown = ascii(name)[:80] if isinstance(name, str) else f"of type {type(name).__name__}"
            raise ForeignFile(f"its class name {shown} is not printable, or too long")
    return tuple(str(numbered[index]) for index in range(len(numbered)))


def checked_architecture(description: Any) -> dict[str, Any]:
    """Return the part of a network description (a model YAML) that builds layers. Raises
    ForeignFile.

    Ultralytics evaluates the activation as Python and calls any name of its module as a layer, so
    both are checked, whether they come from a .pt file or from a YAML file.
    """
    if not isinstance(description, dict) or not all(
        isinstance(description.get(key), list) for key in ("backbone", "head")
    ):
        raise ForeignFile("its network description lacks the lists `backbone` and `head`")
    budget = [MAX_DESCRIPTION_ITEMS]
    architecture = {
        key: _plain(description[key], budget) for key in NETWORK_KEYS if key in description
    }
    activation = description.get("activation")
    if activation is not None:
        if not isinstance(activation, str) or not ACTIVATION.fullmatch(activation):
            raise ForeignFile(
                f"its activation {ascii(activation)[:60] if isinstance(activation, str) else ''} "
                "is not a layer such as nn.SiLU()"
            )
        architecture["activation"] = activation
    layers = architecture["backbone"] + architecture["head"]
    if len(layers) > MAX_LAYERS:
        raise ForeignFile(
            f"its network description has {len(layers)} layers, more than {MAX_LAYERS}"
        )
    for layer in layers:
        if not (
            isinstance(layer, list)
            and len(layer) == 4
            and isinstance(layer[1], int)
            and isinstance(layer[3], list)
        ):
            raise ForeignFile(
                f"its layer {str(layer)[:60]!r} is not [from, repeats, module, arguments]"
            )
        if (
            not isinstance(layer[2], str)
            or not LAYER_NAME.fullmatch(layer[2])
            or layer[2] in FETCHES_WEIGHTS
        ):
            raise ForeignFile(f"its layer {str(layer[2])[:60]!r} is not supported")
        if not 1 <= layer[1] <= MAX_REPEATS:
            raise ForeignFile(
                f"its layer {layer[2]} is repeated {layer[1]} times; 1 to {MAX_REPEATS} are allowed"
            )
    return architecture


def _plain(value: Any, budget: list[int]) -> Any:
    """Copy numbers, strings, lists and dictionaries. Raises ForeignFile for anything else and for
    too large numbers.

    `budget` counts down the items left: lists that contain the same list many times are short in
    the file alone.
    """
    budget[0] -= 1
    if budget[0] < 0:
        raise ForeignFile(f"its network description has more than {MAX_DESCRIPTION_ITEMS} items")
    if isinstance(value, list | tuple):
        return [_plain(item, budget) for item in value]
    if isinstance(value, dict):
        return {_plain(key, budget): _plain(item, budget) for key, item in value.items()}
    if isinstance(value, int | float) and abs(value) <= MAX_LAYER_NUMBER:
        return value
    if value is None or (isinstance(value, str) and len(value) <= 100):
        return value
    raise ForeignFile(
        f"its network description holds a value that no layer takes: {type(value).__name__}"
    )


def _plain_options(options: Any) -> dict[str, Any]:
    """Return the plain training options (`imgsz`, `data`, …) that a model carries; older files wrap
    them.
    """
    found = options.content if isinstance(options, _Shell) else options
    if not isinstance(found, dict):
        return {}
    return {str(name): value for name, value in found.items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    """Return whether an option is a scalar, or a list or a dictionary of numbers."""
    if isinstance(value, list):
        return all(isinstance(number, int | float) for number in value)
    if isinstance(value, dict):
        return all(
            isinstance(key, str) and isinstance(number, int | float)
            for key, number in value.items()
        )
    return isinstance(value, str | int | float | bool)
