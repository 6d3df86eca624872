"""Exports behind the torch model's interface: the same outputs, sizes, batches and names; clear
errors.
"""

import ctypes
import gc
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from tests.predict.tiny_network import NAMES, SIZE_PX, WINDOWS, smooth_images, tiny_weights
from tests.support.plugin import PROJECT
from yolo_seg_ddp.extras.exports import exported
from yolo_seg_ddp.extras.exports.conversion import Variant, check_variants, convert
from yolo_seg_ddp.extras.exports.exported import METADATA_KEY, ExportedModel, ExportMetadata
from yolo_seg_ddp.extras.exports.proof import BOUNDS, compare_outputs, decoded_outputs
from yolo_seg_ddp.predict.models import open_model
from yolo_seg_ddp.predict.tiles import Predictor
from yolo_seg_ddp.utils.errors import UserError
from yolo_seg_ddp.yolo.model import (
    class_names,
    load_for_prediction,
    load_weights,
    trained_size_px,
    trained_windows,
)

CPU = torch.device("cpu")
KINDS = ("onnx", "openvino", "torchscript")


def facts(
    precision: str = "fp32", batch_size: int = 1, *, dynamic: bool = False, **others: Any
) -> ExportMetadata:
    """Return the facts of an export of this network."""
    known = {
        "windows": None,
        "source_sha256": "0" * 64,
        "names": NAMES,
        "size_px": SIZE_PX,
        **others,
    }
    return ExportMetadata(batch_size=batch_size, is_dynamic=dynamic, precision=precision, **known)


def export(weights: Path, kind: str, folder: Path, wanted: ExportMetadata) -> Path:
    """Return the export in a new folder."""
    folder.mkdir()
    return convert(
        load_weights(str(weights)), Variant(kind, wanted.precision), wanted, folder, weights.stem
    )


def scores_of(model: Any, images: torch.Tensor, mask_score: bool = True) -> list[float]:
    """Return the scores of all detections, as every command finds them."""
    photos = (images.permute(0, 2, 3, 1) * 255).byte().numpy()
    limits = {"confidence": 0.3, "iou": 0.7, "mask_score": mask_score}
    predicted = Predictor(model, images.shape[-1], CPU, len(images), None, limits).predict(
        enumerate(photos)
    )
    return [
        score for _, _, prediction in predicted for score in prediction.detections.scores.tolist()
    ]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_weights(tmp_path_factory.mktemp("tiny") / "best.pt", WINDOWS)


@pytest.fixture(scope="module")
def exports(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """ONNX with dynamic sizes; the others for two images at a time."""
    root = tmp_path_factory.mktemp("exports")
    found = {}
    for kind in KINDS:
        if kind != "torchscript":
            pytest.importorskip(
                kind,
                reason="needs the packages of exports (pip install -r requirements-export.txt)",
            )
        wanted = facts(windows=WINDOWS, batch_size=2, dynamic=kind == "onnx")
        found[kind] = export(weights, kind, root / kind, wanted)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_every_runtime_computes_what_torch_computes_in_batches_of_any_size_and_knows_its_model(
    weights: Path, exports: dict[str, Path], kind: str
) -> None:
    model = open_model(f"{exports[kind]}{'/' * (kind == 'openvino')}", CPU)
    ours = load_for_prediction(str(weights), CPU)
    assert (class_names(model), trained_size_px(model), trained_windows(model)) == (
        NAMES,
        SIZE_PX,
        WINDOWS,
    )
    for size_px in (SIZE_PX, 96) if kind == "onnx" else (SIZE_PX,):
        for count in (1, 2, 3):
            images = smooth_images(count, size_px)
            expected = decoded_outputs(ours, images)
            # else equal outputs would prove nothing
            assert float(expected["probabilities"].std()) > 0.05
            assert float(expected["prototypes"].std()) > 0.05
            largest, failures = compare_outputs(
                expected, decoded_outputs(model, images), BOUNDS["fp32"]
            )
            assert failures == []
            assert len(largest) == 4
            plain, *scores = (
                scores_of(*one) for one in ((ours, images, False), (ours, images), (model, images))
            )
            assert scores[1] == pytest.approx(scores[0], abs=1e-4), "masks decide on scores alike"
            assert sum(plain) > 1.01 * sum(scores[0]) > 1


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="reads /proc (run it on Linux)")
def test_a_signal_after_openvino_models_were_closed_kills_the_process(
    exports: dict[str, Path],
) -> None:
    first = open_model(str(exports["openvino"]), CPU)
    second = open_model(str(exports["openvino"]), CPU)
    del first
    gc.collect()
    del second
    gc.collect()
    stack = (ctypes.c_size_t * 3)()  # stack_t of signal.h: address, flags, size
    assert ctypes.CDLL(None).sigaltstack(None, stack) == 0
    ranges = [
        line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()
    ]
    assert not stack[2] or any(int(start, 16) <= stack[0] < int(end, 16) for start, end in ranges)


def test_another_size_than_that_of_a_fixed_export_is_refused_in_one_line(
    exports: dict[str, Path],
) -> None:
    with pytest.raises(
        UserError, match=r"best\.torchscript takes inputs of 64 px, not 96 px: leave out --img-size"
    ):
        open_model(str(exports["torchscript"]), CPU)(smooth_images(1, 96))


def test_runtimes_use_as_many_threads_as_torch_and_the_precision_asked_for(
    exports: dict[str, Path],
) -> None:
    onnx = open_model(str(exports["onnx"]), CPU)._run.session.get_session_options()
    assert (onnx.intra_op_num_threads, onnx.inter_op_num_threads) == (1, 1)
    network = open_model(str(exports["openvino"]), CPU)._run.network
    assert network.get_property("INFERENCE_NUM_THREADS") == 1
    hint = str(network.get_property("INFERENCE_PRECISION_HINT"))
    assert "f32" in hint or "float" in hint


def test_amp_is_refused_where_the_export_fixes_the_precision(exports: dict[str, Path]) -> None:
    with pytest.raises(
        UserError, match=r"--amp bf16: .*best\.onnx computes in the precision it was exported with"
    ):
        open_model(str(exports["onnx"]), CPU, "bf16")
    assert class_names(open_model(str(exports["onnx"]), CPU, "auto")) == NAMES


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        ("openvino", {"batch_size": 3}),
        ("openvino", {"size_px": 128}),
        ("torchscript", {"size_px": 128}),
    ],
)
def test_facts_that_do_not_fit_the_network_give_one_line(
    exports: dict[str, Path], kind: str, wrong: dict[str, int]
) -> None:
    right = open_model(str(exports[kind]), CPU)
    model = ExportedModel(right.path, kind, replace(right.metadata, **wrong), right._run)
    with pytest.raises(
        UserError, match=r"fails on inputs of \(\d, 3, \d+, \d+\) \(.+\); export it again$"
    ) as caught:
        model(smooth_images(1, model.metadata.size_px))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "precision", "package"),
    [("onnx", "fp32", "onnxslim"), ("openvino", "fp32", "openvino"), ("openvino", "int8", "nncf")],
)
def test_a_missing_package_gives_the_command_that_installs_it(
    kind: str, precision: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        UserError,
        match=rf"package {package} is missing .*: pip install -r requirements-export\.txt$",
    ):
        check_variants([Variant(kind, precision)], CPU)
    assert (PROJECT / "requirements-export.txt").is_file()


def test_what_this_machine_cannot_export_is_refused_before_any_work() -> None:
    for variant, complaint in (
        (Variant("engine", "fp32"), "TensorRT needs an NVIDIA GPU; here use onnx or openvino"),
        (Variant("torchscript", "fp16"), "TorchScript in fp16 needs an NVIDIA GPU"),
        (Variant("torchscript", "int8"), "TorchScript has no INT8"),
    ):
        with pytest.raises(UserError, match=complaint):
            check_variants([variant], CPU)
    with pytest.raises(UserError, match="--no-fp32: add --half or --int8"):
        check_variants([], CPU)


TELEMETRY = """
import socket, sys
def refuse(*arguments, **named):
    raise SystemExit(f"looked up {arguments}")
socket.getaddrinfo = socket.socket.connect = socket.socket.connect_ex = refuse
from yolo_seg_ddp.extras.exports.exported import import_runtime
openvino, wrapper = import_runtime("openvino"), import_runtime("nncf.telemetry.wrapper")
from openvino.tools.ovc import telemetry_utils
assert telemetry_utils.tm.__name__ == "openvino.tools.ovc.telemetry_stub", telemetry_utils.tm
telemetry = wrapper.telemetry
assert telemetry is not None and not isinstance(telemetry, wrapper.NNCFTelemetry), telemetry
wrapper.telemetry.send_event("category", "action", "label", force_send=True)
there = [name for name, module in sys.modules.items() if module]
loaded = [name for name in there if name.startswith("openvino_telemetry")]
assert not loaded, loaded
print("stand-ins only")
"""


def test_openvino_and_nncf_send_no_statistics() -> None:
    """In a process of its own: NNCF switches its statistics off if pytest is loaded."""
    for package in ("openvino", "nncf", "openvino_telemetry"):
        if package not in sys.modules:
            pytest.importorskip(
                package,
                reason="needs the packages of exports (pip install -r requirements-export.txt)",
            )
    done = subprocess.run(
        [sys.executable, "-c", TELEMETRY],
        capture_output=True,
        text=True,
        cwd=PROJECT,
        timeout=120,
        check=False,
    )
    assert done.stdout.strip() == "stand-ins only", done.stderr[-2000:]


SHAPES = {
    "images": (2, 3, SIZE_PX, SIZE_PX),
    "output1": (2, 32, 16, 16),
    "output0": (2, 4 + len(NAMES) + 32, 84),
}
STREAM = 77


def nptype(dtype: str) -> type:
    return np.float16 if dtype == "half" else np.float32


def fake_engine(run: Any) -> Any:
    """Return TensorRT 10's engine and context over a torch function; it reaches tensors through
    their addresses alone.
    """
    addresses: dict[str, int] = {}

    def tensor(name: str) -> np.ndarray:
        dtype = np.dtype(nptype(engine.get_tensor_dtype(name)))
        memory: Any = (ctypes.c_byte * (int(np.prod(SHAPES[name])) * dtype.itemsize)).from_address(
            addresses[name]
        )
        return np.frombuffer(memory, dtype).reshape(SHAPES[name])

    def execute(stream: int) -> bool:
        tensor("output0")[:], tensor("output1")[:] = run(torch.from_numpy(tensor("images").copy()))
        return stream == STREAM

    engine: Any = SimpleNamespace(
        num_io_tensors=len(SHAPES),
        create_execution_context=lambda: engine,
        get_tensor_name=list(SHAPES).__getitem__,
        get_tensor_mode=lambda name: "in" if name == "images" else "out",
        get_tensor_dtype=lambda name: "half" if name == "output1" else "float",
        set_input_shape=lambda name, shape: shape == SHAPES[name],
        get_tensor_shape=SHAPES.__getitem__,
        set_tensor_address=addresses.__setitem__,
        execute_async_v3=execute,
    )
    return engine


def engine_file(path: Path, metadata: dict[str, Any], engine: bytes) -> Path:
    text = json.dumps(metadata).encode()
    path.write_bytes(len(text).to_bytes(4, "little", signed=True) + text + engine)
    return path


def test_the_tensorrt_adapter_binds_shapes_addresses_and_stream(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = load_for_prediction(str(weights), CPU)

    @torch.no_grad()
    def run(images: torch.Tensor) -> Any:
        return ours(images)[0]

    fake = SimpleNamespace(
        Runtime=lambda _: SimpleNamespace(
            deserialize_cuda_engine={b"engine": fake_engine(run)}.get
        ),
        Logger=Mock(spec=["ERROR"]),
        TensorIOMode=SimpleNamespace(INPUT="in", OUTPUT="out"),
        nptype=nptype,
    )
    monkeypatch.setattr(exported, "import_runtime", lambda package: fake)
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=STREAM)
    )
    metadata = {METADATA_KEY: facts(batch_size=2).to_json(), "names": dict(enumerate(NAMES))}
    path = engine_file(tmp_path / "best.engine", metadata, b"engine")
    gpu = SimpleNamespace(type="cuda", index=0)
    model: Any = open_model(str(path), gpu)  # type: ignore[arg-type]
    for count in (1, 3):
        largest, failures = compare_outputs(
            decoded_outputs(ours, smooth_images(count)),
            decoded_outputs(model, smooth_images(count)),
            BOUNDS["fp16"],
        )
        assert failures == []
        assert largest["prototypes"] > 0  # the fake returns them in fp16
    stale = engine_file(tmp_path / "stale.engine", metadata, b"of another GPU")
    with pytest.raises(UserError, match="made by another version of TensorRT, or for another GPU"):
        open_model(str(stale), gpu)  # type: ignore[arg-type]
    (tmp_path / "bare.engine").write_bytes(b"\xff\xff\xff\xff engine of another program")
    with pytest.raises(UserError, match="has no metadata in front"):
        open_model(str(tmp_path / "bare.engine"), gpu)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="TensorRT needs an NVIDIA GPU"):
        open_model(str(path), CPU)


@pytest.mark.gpu
def test_a_real_engine_computes_what_torch_computes(weights: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorrt", reason="needs TensorRT (pip install tensorrt)")
    gpu = torch.device("cuda", 0)
    path = export(weights, "engine", tmp_path / "engine", facts(batch_size=2, windows=WINDOWS))
    model, images = open_model(str(path), gpu), smooth_images(3).to(gpu)
    expected = decoded_outputs(load_for_prediction(str(weights), gpu), images)
    assert compare_outputs(expected, decoded_outputs(model, images), BOUNDS["fp16"])[1] == []
    assert trained_windows(model) == WINDOWS
