"""Options of `check_data.py`."""

from dataclasses import dataclass

from yolo_seg_ddp.data.dataset_yaml import DEFAULT_DATASET_YAML, TRUST_LINKS_HELP
from yolo_seg_ddp.predict.options import check_tiles
from yolo_seg_ddp.utils.options import CONFIG_HELP, PRECISION_CHOICES, THREADS_HELP, Options, option

REPORT = "check.html"
FINDINGS = "check.json"


@dataclass(frozen=True)
class CheckConfig(Options):
    """Options of `check_data.py`."""

    data: str = option(
        DEFAULT_DATASET_YAML.name, "data-set YAML: folders and class names", metavar="YAML"
    )
    model: str | None = option(None, "trained model whose predictions are compared with the labels")
    output: str = option("outputs/check", f"folder for {REPORT} and {FINDINGS}", metavar="DIR")
    tolerate: bool = option(
        False, "exit with code 0 when the data has errors; otherwise 1", wants="not strict"
    )
    strict: bool = option(
        False,
        "exit with code 1 for errors even with --tolerate; hints never count",
        wants="tolerate",
    )
    trust_links: bool = option(False, TRUST_LINKS_HELP)
    img_size: int | None = option(
        None,
        "side of the network input in pixels, at which small objects are judged; unset: the "
        "model's, or what the labels need",
        at_least=32,
        multiple_of=32,
    )
    tiles: str = option(
        "auto",
        "with --model: side in pixels of the tiles that larger photographs are cut into; auto: as "
        "the model was trained, which is no tiles if it saw whole photographs",
        metavar="auto|off|SIZE",
        needs="model",
    )
    batch_size: int = option(
        8, "with --model: photographs or tiles per forward pass", at_least=1, needs="model"
    )
    amp: str = option(
        "off", "with --model: mixed precision", choices=PRECISION_CHOICES, needs="model"
    )
    device: str = option("auto", "with --model: auto, cpu, cuda or cuda:N", needs="model")
    threads: int = option(0, f"with --model: {THREADS_HELP}", at_least=0, needs="model")
    num_workers: int = option(0, "threads that read photographs; 0: all usable cores", at_least=0)
    config: str | None = option(None, CONFIG_HELP, metavar="FILE")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_tiles(self.tiles)
