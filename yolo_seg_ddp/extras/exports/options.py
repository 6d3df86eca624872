"""Options of `export.py`."""

from dataclasses import dataclass

from yolo_seg_ddp.data.dataset_yaml import DEFAULT_DATASET_YAML, TRUST_LINKS_HELP
from yolo_seg_ddp.predict.options import check_tiles, overlap_option
from yolo_seg_ddp.utils.options import CONFIG_HELP, INPUT_SIZE, THREADS_HELP, Options, option

PACKAGES = {  # that a format needs, by their import names
    "onnx": ("onnx", "onnxruntime", "onnxslim"),
    "openvino": ("openvino",),
    "torchscript": (),
    "engine": ("onnx", "onnxslim", "tensorrt"),
}
FORMATS = tuple(PACKAGES)
REPORT = "export.json"


@dataclass(frozen=True)
class ExportConfig(Options):
    """Options of `export.py`."""

    model: str = option(
        None, "trained model, such as models/epri_distribution_ddp/best.pt", required=True
    )
    format: tuple[str, ...] = option(("onnx",), "formats to export to", choices=FORMATS)
    fp32: bool = option(True, "export in fp32")
    half: bool = option(False, "export in fp16, too")
    int8: bool = option(
        False, "export in INT8, too; its ranges are measured on photographs of the training split"
    )
    calibration_images: int = option(
        300, "photographs that INT8 ranges are measured on, at most", at_least=1, needs="int8"
    )
    dynamic: bool = option(
        False, "accept any batch size and any input size that is a multiple of 32"
    )
    batch_size: int = option(
        1, "images per forward pass of the export; others are split or filled up", at_least=1
    )
    img_size: int | None = option(
        None, "side of the network input in pixels; unset: as in training", **INPUT_SIZE
    )
    data: str = option(
        DEFAULT_DATASET_YAML.name, "data-set YAML for proof and calibration", metavar="YAML"
    )
    trust_links: bool = option(False, TRUST_LINKS_HELP)
    max_images: int | None = option(
        None,
        "photographs of the validation split for the proof, evenly spaced; unset: all",
        at_least=1,
    )
    tiles: str = option(
        "auto",
        "judge AP on tiles of this side, in the photographs' pixels; auto: as the model was "
        "trained, which is no tiles if it saw whole photographs",
        metavar="auto|off|SIZE",
    )
    overlap: float = overlap_option("not tiles=off")
    ap_tolerance: float | None = option(
        None,
        "how much a class's AP may differ from torch's; unset: 0.002 in fp32, 0.005 in fp16, a "
        "loss of 0.02 in INT8",
        at_least=0,
        at_most=1,
    )
    thresholds: str | None = option(
        None,
        "thresholds.yaml of this model (evaluate_model.py --guarantee), which exports in fp32 "
        "shall carry (yolo_seg_ddp/extras/guarantee/README.md)",
        metavar="FILE",
        needs=("fp32", "not ap_tolerance"),
    )
    speed: bool = option(True, "measure images per second and peak memory of each format")
    output: str | None = option(
        None, f"folder for the exports and {REPORT}; unset: the model's", metavar="DIR"
    )
    device: str = option("auto", "auto, cpu, cuda or cuda:N")
    threads: int = option(0, THREADS_HELP, at_least=0)
    config: str | None = option(None, CONFIG_HELP, metavar="FILE")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_tiles(self.tiles)
