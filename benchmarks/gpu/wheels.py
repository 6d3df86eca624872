"""Packages from a folder of wheels, for a machine without a network. Needs no package itself."""

from __future__ import annotations

import importlib
import os
import sys
import zipfile
from contextlib import suppress
from pathlib import Path

from yolo_seg_ddp.utils.environment import prepare_environment

# The modules of requirements.txt that the parts import.
NEEDED = (
    *(
        "torch",
        "torchvision",
        "ultralytics",
        "numpy",
        "cv2",
        "yaml",
        "requests",
        "urllib3",
        "matplotlib",
        "simplejpeg",
    ),
    *(
        "PIL",
        "shapely",
        "remotezip",
        "filelock",
        "tensorboard",
        "faster_coco_eval",
        "pynvml",
        "tqdm",
        "psutil",
    ),
    "pytest",
)


def unpack(wheels: Path, site: Path) -> list[str]:
    """Unpack the wheels of a folder into `site`, unless they lie there
    already; return their names.
    """
    files = sorted(wheels.glob("*.whl"))
    done = site / ".unpacked"
    names = [file.name for file in files]
    if not done.exists() or done.read_text() != "\n".join(names):
        site.mkdir(parents=True, exist_ok=True)
        for file in files:
            with zipfile.ZipFile(file) as archive:
                archive.extractall(site)
        done.write_text("\n".join(names))
    return names


def start_again_with(site: Path, module: str, arguments: list[str]) -> None:
    """Replace this process by `python -m module` that also finds packages in `site`.

    PYTHONPATH is kept, not replaced.
    """
    search = [*filter(None, [os.environ.get("PYTHONPATH")]), str(site.resolve())]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(search)}
    del environment["WHEELS"]
    os.execve(sys.executable, [sys.executable, "-m", module, *arguments], environment)


def missing_modules() -> list[str]:
    """Import each needed module; return those that fail, with the reason, such as a wheel of
    another Python.
    """
    missing = []
    with suppress(ImportError):  # of torch, which is named below
        prepare_environment()
    for name in NEEDED:
        try:
            importlib.import_module(name)
        except Exception as error:  # noqa: BLE001 # a wrong wheel fails in many ways
            missing.append(f"{name} ({type(error).__name__}: {' '.join(str(error).split())[:150]})")
    return missing
