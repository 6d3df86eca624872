"""Opens exported models (ONNX, OpenVINO, TorchScript, TensorRT) behind the interface of the torch
model.

An export takes float32 (B, 3, S, S) in 0..1 and returns boxes that it has decoded itself, so it has
no training loss. Resizing, suppression, masks and tiles are the code that the torch model uses.
"""

from __future__ import annotations

import ast
import functools
import importlib
import json
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from yolo_seg_ddp.data.target_masks import MASK_STRIDE
from yolo_seg_ddp.utils.contents import mapping, parse_json, read_back
from yolo_seg_ddp.utils.devices import choose_precision
from yolo_seg_ddp.utils.errors import UserError, one_line
from yolo_seg_ddp.yolo.model import MAX_INPUT_PX, RESIZE, are_possible_windows
from yolo_seg_ddp.yolo.weights_file import ForeignFile, checked_names

METADATA_KEY = "yolo_seg_ddp"  # under which Ultralytics' metadata hold this project's
METADATA_VERSION = 1
TRAINING_FIELDS = (
    "wires_end_at",
    "wire_width",
    "wires_parallel",
    "wires_bent",
    "label_lengths",
    "stretch",
    "mask_score",
)
REQUIREMENTS = "requirements-export.txt"
MAX_NAMES_CHARACTERS = 300_000
METADATA_BYTES = 4  # in front of an engine: the length of its metadata, little-endian
# OpenVINO and NNCF send statistics through this package, and use stand-ins of their own if its
# import fails. Its switch `opt_in_out --opt_out` is not used: it sends a message itself.
sys.modules["openvino_telemetry"] = None  # type: ignore[assignment]


@dataclass(frozen=True)
class ExportMetadata:
    """What an export must know about its model.

    size_px, batch_size: of the input; if `is_dynamic` an export takes others, too. source_sha256:
    of the .pt file. windows, thin_classes and what follows: what the .pt file says of its training.
    thresholds: the text of a thresholds.yaml that was judged with the .pt file; empty: none.
    Exports of earlier versions lack some of it.
    """

    names: tuple[str, ...]
    size_px: int
    batch_size: int
    is_dynamic: bool
    precision: str  # fp32, fp16 or int8
    windows: dict[str, float] | None
    source_sha256: str
    thin_classes: list[int] = field(default_factory=list)
    wires_end_at: list[int] = field(default_factory=list)
    wire_width: list[float] = field(default_factory=list)
    wires_parallel: list[float] = field(default_factory=list)
    wires_bent: list[int] = field(default_factory=list)
    label_lengths: list[float] = field(default_factory=list)
    stretch: list[float] = field(default_factory=list)
    thresholds: str = ""
    mask_score: bool = True

    def to_json(self) -> str:
        """Return the text that is stored in the export."""
        return json.dumps({"version": METADATA_VERSION, "resize": RESIZE, **asdict(self)})


def open_export(
    path: Path, device: torch.device, amp: str = "off", *, nms: bool = True
) -> ExportedModel:
    """Open an export by its suffix (a folder for OpenVINO), for
    `yolo_seg_ddp.predict.models.open_model`.

    Only OpenVINO obeys `amp`, on the CPU. No export has the outputs that YOLO26 predicts with
    without `nms`. Raises UserError: one line with the file, the problem and the fix.
    """
    kind = "openvino" if path.is_dir() else path.suffix[1:]
    if not path.exists():
        raise UserError(
            f"{path}: no such file; make it with python export.py --model best.pt --format {kind}"
        )
    for file in path.iterdir() if kind == "openvino" else [path]:
        # Reading a pipe would block.
        if not file.is_file() and not file.is_dir():
            raise UserError(f"{file}: not a regular file; name an export's file or folder")
    if not nms:
        raise UserError(
            f"--no-nms: {path} is an export, which needs non-maximum suppression; name the .pt file"
        )
    if kind != "openvino" and amp not in ("off", "auto"):
        raise UserError(
            f"--amp {amp}: {path} computes in the precision it was exported with; leave --amp out"
        )
    try:
        runtime = _RUNTIMES[kind](path, device, amp)
    except UserError:
        raise
    # At a damaged file each runtime raises its own kinds of errors.
    except Exception as error:
        raise UserError(f"{path}: cannot be opened ({one_line(error)}); export it again") from error
    return ExportedModel(path, kind, read_metadata(path, runtime.metadata), runtime)


class ExportedModel(nn.Module):
    """An export that prediction and evaluation use like the torch model.

    `run` takes float32 (B, 3, S, S), contiguous, and returns two tensors: predictions (B, 4 +
    classes + 32, A), which are xywh boxes in input pixels, probabilities and mask coefficients, and
    prototypes (B, 32, S/4, S/4).
    """

    stride = (8, 16, 32)
    has_loss = False  # its outputs are decoded

    def __init__(
        self,
        path: Path,
        kind: str,
        metadata: ExportMetadata,
        run: Callable[[torch.Tensor], list[torch.Tensor]],
    ) -> None:
        super().__init__()
        self.path = path
        self.kind = kind
        self.metadata = metadata
        self.names = dict(enumerate(metadata.names))
        trained = {
            name: getattr(metadata, name) for name in ("windows", "thin_classes", *TRAINING_FIELDS)
        }
        self.args = {"imgsz": metadata.size_px, **trained}
        self._run = run

    def forward(self, images: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the outputs that `yolo_seg_ddp.predict.detections.detect` takes, on the device of
        the images.
        """
        metadata = self.metadata
        if not metadata.is_dynamic and images.shape[-2:] != (metadata.size_px, metadata.size_px):
            raise UserError(
                f"{self.path} takes inputs of {metadata.size_px} px, not {images.shape[-1]} px: "
                "leave out --img-size, or "
                f"export again with --dynamic or --img-size {images.shape[-1]}"
            )
        is_limited = (
            not metadata.is_dynamic or self.kind == "engine"
        )  # an engine has a largest batch
        parts = images.split(metadata.batch_size if is_limited else len(images))
        with torch.autocast(images.device.type, enabled=False):
            outputs = [self._run_padded(part.contiguous()) for part in parts]
        predictions, prototypes = (
            torch.cat(column).to(images.device) for column in zip(*outputs, strict=True)
        )
        boxes, probabilities, coefficients = predictions.split(
            [4, len(metadata.names), prototypes.shape[1]], 1
        )
        return {
            "xywh": boxes,
            "probabilities": probabilities,
            "mask_coefficient": coefficients,
            "proto": prototypes,
        }

    def _run_padded(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        count = len(images)
        missing = self.metadata.batch_size - len(images)
        if missing > 0 and not self.metadata.is_dynamic:
            images = torch.cat([images, images[-1:].expand(missing, -1, -1, -1)])
        try:
            outputs = sorted(self._run(images), key=lambda output: output.ndim)
        except UserError:
            raise
        # Each runtime has its own kinds of errors.
        except Exception as error:
            shape = tuple(images.shape)
            raise UserError(
                f"{self.path}: fails on inputs of {shape} ({one_line(error)}); export it again"
            ) from error
        predictions, prototypes = self._checked(outputs, images)
        return predictions[:count], prototypes[:count]

    def _checked(self, outputs: list[torch.Tensor], images: torch.Tensor) -> list[torch.Tensor]:
        """Return a batch's outputs.

        Raises UserError unless they are those of a YOLO segmentation network.
        """
        shapes = [tuple(output.shape) for output in outputs]
        side = images.shape[-1] // MASK_STRIDE
        if (
            [len(shape) for shape in shapes] != [3, 4]
            or shapes[0][0] != len(images)
            or shapes[1] != (len(images), shapes[1][1], side, side)
        ):
            raise UserError(
                f"{self.path}: its outputs {', '.join(map(str, shapes))} are not those of a YOLO "
                "segmentation model; export it again"
            )
        num_classes = shapes[0][1] - 4 - shapes[1][1]
        if num_classes != len(self.metadata.names):
            raise UserError(
                f"{self.path}: the network has {num_classes} classes but its metadata name "
                f"{len(self.metadata.names)}; export it again"
            )
        return outputs


def read_metadata(path: Path, stored: Mapping[str, Any]) -> ExportMetadata:
    """Return this project's metadata among those that an export stores.

    Raises UserError if they are missing, damaged or of another version.
    """
    again = "export it again: python export.py --model best.pt"
    try:
        content = parse_json(stored[METADATA_KEY])
        version = content.pop("version")
        resize = content.pop("resize")
    except KeyError as error:
        raise UserError(
            f"{path}: its metadata lack what this project needs ({error.args[0]}); {again}"
        ) from error
    except (TypeError, ValueError, AttributeError, RecursionError) as error:
        raise UserError(f"{path}: its metadata are damaged ({one_line(error)}); {again}") from error
    if (version, resize) != (METADATA_VERSION, RESIZE):
        raise UserError(
            f"{path}: made by another version of this project ({version}, {resize}); {again}"
        )
    try:
        metadata = ExportMetadata(**{**content, "names": checked_names(content["names"])})
        # ONNX stores them as one text, JSON with texts for the numbers
        theirs = stored.get("names")
        theirs = (
            ast.literal_eval(theirs[:MAX_NAMES_CHARACTERS]) if isinstance(theirs, str) else theirs
        )
        if not isinstance(theirs, dict):
            raise TypeError(f"class names are {type(theirs).__name__}")
        theirs = checked_names({int(index): name for index, name in theirs.items()})
        is_sound = _is_sound(metadata)
    except (
        TypeError,
        ValueError,
        KeyError,
        SyntaxError,
        RecursionError,
        MemoryError,
        ForeignFile,
    ) as error:
        raise UserError(f"{path}: its metadata are damaged ({one_line(error)}); {again}") from error
    if not is_sound:
        raise UserError(f"{path}: its metadata hold impossible values; {again}")
    if metadata.names != theirs:
        raise UserError(
            f"{path}: its metadata name the classes twice and differently, {', '.join(theirs)} and "
            f"{', '.join(metadata.names)}; {again}"
        )
    return metadata


def _is_sound(metadata: ExportMetadata) -> bool:
    """Return whether the numbers are possible: an edited file must not choose a tile of zero pixels
    or all memory.
    """
    return (
        all(type(number) is int for number in (metadata.size_px, metadata.batch_size))
        and 32 <= metadata.size_px <= MAX_INPUT_PX
        and metadata.size_px % 32 == 0
        and 1 <= metadata.batch_size <= most_images(metadata.size_px)
        and isinstance(metadata.is_dynamic, bool)
        and isinstance(metadata.mask_score, bool)
        and metadata.precision in ("fp32", "fp16", "int8")
        and (metadata.windows is None or are_possible_windows(metadata.windows))
    )


def most_images(size_px: int) -> int:
    """Return how many images of this side a fixed batch may hold: together no more pixels than one
    image of the largest side.
    """
    return MAX_INPUT_PX**2 // size_px**2


def import_runtime(package: str) -> Any:
    """Import an optional package.

    Raises UserError with the cure if it is missing. Nothing is sent over the network.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        cure = "pip install tensorrt" if package == "tensorrt" else f"pip install -r {REQUIREMENTS}"
        raise UserError(
            f"the package {package} is missing ({one_line(error, 80)}): {cure}"
        ) from error


class _OnnxRuntime:
    def __init__(self, path: Path, device: torch.device, amp: str) -> None:
        runtime = import_runtime("onnxruntime")
        # On Windows it has some.
        runtime.disable_telemetry_events()
        options = runtime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.inter_op_num_threads = 1
        options.log_severity_level = 3  # errors
        # Its threads would spin between two batches, when torch's threads need the cores.
        options.add_session_config_entry("session.force_spinning_stop", "1")
        has_gpu = (
            device.type == "cuda" and "CUDAExecutionProvider" in runtime.get_available_providers()
        )
        gpu: list[Any] = (
            [("CUDAExecutionProvider", {"device_id": device.index or 0})] if has_gpu else []
        )
        self.session = runtime.InferenceSession(
            str(path), options, providers=[*gpu, "CPUExecutionProvider"]
        )
        self.metadata = self.session.get_modelmeta().custom_metadata_map
        self.input_name = self.session.get_inputs()[0].name

    def __call__(self, images: torch.Tensor) -> list[torch.Tensor]:
        outputs = self.session.run(None, {self.input_name: images.cpu().numpy()})
        return [torch.from_numpy(output) for output in outputs]


@functools.cache
def _openvino_core(runtime: Any) -> Any:
    """Return the process's only Core.

    A Core replaces the stack that signal handlers run on, and frees that stack when it ends. After
    two Cores had ended in the order of their begin, the next signal killed the process, even the
    signal that a child has ended.
    """
    return runtime.Core()


class _OpenVino:
    def __init__(self, path: Path, device: torch.device, amp: str) -> None:
        runtime = import_runtime("openvino")
        networks = sorted(path.glob("*.xml"))
        if len(networks) != 1:
            raise UserError(
                f"{path}: an OpenVINO folder holds one .xml file, this one {len(networks)}"
            )
        metadata = path / "metadata.yaml"
        self.metadata = (
            read_back(metadata, mapping, "export it again", is_yaml=True)
            if metadata.exists()
            else {}
        )
        has_bf16 = choose_precision(amp, torch.device("cpu")).dtype == torch.bfloat16
        settings = {
            # By default OpenVINO computes in bf16 on processors with AMX, whatever the export's
            # precision.
            "INFERENCE_PRECISION_HINT": "bf16" if has_bf16 else "f32",
            "INFERENCE_NUM_THREADS": torch.get_num_threads(),
            "PERFORMANCE_HINT": "LATENCY",
        }
        self.network = _openvino_core(runtime).compile_model(str(networks[0]), "CPU", settings)

    def __call__(self, images: torch.Tensor) -> list[torch.Tensor]:
        return [
            torch.from_numpy(output) for output in self.network([images.cpu().numpy()]).values()
        ]


class _TorchScript:
    def __init__(self, path: Path, device: torch.device, amp: str) -> None:
        content = {"config.txt": ""}
        with warnings.catch_warnings():
            # PyTorch recommends another format.
            warnings.simplefilter("ignore", FutureWarning)
            self.network = torch.jit.load(
                str(path), map_location=device, _extra_files=content
            ).eval()
        self.metadata = parse_json(content["config.txt"] or "{}")
        self.is_half = parse_json(self.metadata.get(METADATA_KEY, "{}")).get("precision") == "fp16"

    @torch.no_grad()
    def __call__(self, images: torch.Tensor) -> list[torch.Tensor]:
        return list(self.network(images.half() if self.is_half else images))


class _TensorRT:
    """TensorRT 10 or newer: the interface of named tensors."""

    def __init__(self, path: Path, device: torch.device, amp: str) -> None:
        if device.type != "cuda":
            raise UserError(
                f"{path}: TensorRT needs an NVIDIA GPU (--device cuda); use the ONNX or OpenVINO "
                "export"
            )
        self.runtime = import_runtime("tensorrt")
        self.device = device
        data = path.read_bytes()
        length = int.from_bytes(data[:METADATA_BYTES], "little", signed=True)
        if not 0 < length <= len(data) - METADATA_BYTES:
            raise UserError(
                f"{path}: has no metadata in front; export it again: python export.py --format "
                "engine"
            )
        self.metadata = parse_json(data[METADATA_BYTES:][:length])
        runtime = self.runtime.Runtime(self.runtime.Logger(self.runtime.Logger.ERROR))
        self.engine = runtime.deserialize_cuda_engine(data[METADATA_BYTES + length :])
        if self.engine is None:
            raise UserError(
                f"{path}: made by another version of TensorRT, or for another GPU; export it "
                "again here"
            )
        self.context = self.engine.create_execution_context()
        names = [
            self.engine.get_tensor_name(number) for number in range(self.engine.num_io_tensors)
        ]
        is_input = [
            self.engine.get_tensor_mode(name) == self.runtime.TensorIOMode.INPUT for name in names
        ]
        self.input_name = names[is_input.index(True)]
        self.output_names = [
            name for name, is_one in zip(names, is_input, strict=True) if not is_one
        ]

    def __call__(self, images: torch.Tensor) -> list[torch.Tensor]:
        images = images.to(self._dtype_of(self.input_name))
        if not self.context.set_input_shape(self.input_name, tuple(images.shape)):
            raise UserError(
                f"the engine takes no batch of shape {tuple(images.shape)}; export it again with "
                "--batch-size"
            )
        outputs = {
            name: torch.empty(
                tuple(self.context.get_tensor_shape(name)),
                dtype=self._dtype_of(name),
                device=images.device,
            )
            for name in self.output_names
        }
        for name, tensor in {self.input_name: images, **outputs}.items():
            self.context.set_tensor_address(name, tensor.data_ptr())
        if not self.context.execute_async_v3(torch.cuda.current_stream(self.device).cuda_stream):
            raise RuntimeError("TensorRT refused the batch")
        return list(outputs.values())

    def _dtype_of(self, name: str) -> torch.dtype:
        return torch.from_numpy(
            np.empty(0, self.runtime.nptype(self.engine.get_tensor_dtype(name)))
        ).dtype


_RUNTIMES: dict[str, Callable[[Path, torch.device, str], Any]] = {
    "onnx": _OnnxRuntime,
    "openvino": _OpenVino,
    "torchscript": _TorchScript,
    "engine": _TensorRT,
}
