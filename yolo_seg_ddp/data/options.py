"""Options of a training that say which data set it reads, and how."""

from dataclasses import dataclass
from typing import ClassVar

from yolo_seg_ddp.data.dataset_yaml import DEFAULT_DATASET_YAML, TRUST_LINKS_HELP
from yolo_seg_ddp.utils.options import INPUT_SIZE, Options, option


@dataclass(frozen=True)
class DataOptions(Options):
    """Which data set a training reads, at which size, and how it is loaded."""

    group: ClassVar[str] = "data"

    data: str = option(DEFAULT_DATASET_YAML.name, "folders and class names", metavar="YAML")
    trust_links: bool = option(False, TRUST_LINKS_HELP, may_differ=True)
    img_size: int = option(640, "side of the square input in pixels", **INPUT_SIZE)
    multi_scale: bool = option(False, "each batch at 0.5 to 1.5 times --img-size")
    cache: str = option(
        "auto",
        "packed copy of the photographs; auto: if the disk has room; packed: end if it has none",
        choices=("auto", "packed", "none"),
        words={"ram": "packed", "disk": "packed"},
        may_differ=True,
        group="speed",
        wants="not windows",
    )
    cache_dir: str | None = option(
        None,
        "folder on a fast disk for the packed copy; unset: .cache in the data set",
        metavar="DIR",
        may_differ=True,
        group="speed",
    )
    skip_bad: bool = option(False, "leave out photographs that cannot be read", may_differ=True)
    num_workers: int | None = option(
        None,
        "most loader processes per GPU; unset: 8, and up to 16 if a GPU has more cores to itself",
        at_least=0,
        may_differ=True,
        group="speed",
    )
    prefetch: int = option(
        4,
        "batches ahead per loader process",
        at_least=1,
        may_differ=True,
        group="speed",
        wants="num_workers",
    )
