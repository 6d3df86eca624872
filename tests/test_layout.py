"""Imports point one way: from the scripts down to `utils/common`, without a circle."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter

import pytest

from tests.conftest import PROJECT

# A module may import its own room and the rooms of lower floors. `utils` is what lies flat in utils/; all that lies
# outside utils/ (scripts, recipes, benchmarks, chaos) is one room at the top.
FLOORS = (
    ("common",),
    ("data", "distributed"),
    ("sources", "run"),
    ("yolo", "engine"),
    ("predict",),
    ("evaluation",),
    ("pages", "measure"),
    ("training", "export"),
    ("utils",),
    ("outside",),
)
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
OUTSIDE = ("benchmarks", "chaos", "recipes")


def project_modules() -> dict[str, str]:
    """Return the source of each module of the project but the tests, by its dotted name."""
    files = [*PROJECT.glob("*.py"), *(file for name in ("utils", *OUTSIDE) for file in (PROJECT / name).rglob("*.py"))]
    dotted = {file: ".".join(file.relative_to(PROJECT).with_suffix("").parts) for file in files}
    return {name.removesuffix(".__init__"): file.read_text(encoding="utf-8") for file, name in dotted.items()}


def imported(source: str, modules: Mapping[str, str]) -> set[str]:
    """Return the project's modules that a source imports anywhere: in functions and for type checkers, too."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in modules else str(node.module) for name in names}
    return found & modules.keys()


def room_of(module: str) -> str:
    first, *rest = module.split(".")
    if first != "utils":
        return "outside"
    return rest[0] if rest and rest[0] in FLOOR else "utils"


def wrong_imports(modules: Mapping[str, str]) -> list[str]:
    """Return the imports that point up or across, and the first circle."""
    graph = {name: imported(source, modules) for name, source in modules.items()}
    arrows = [(name, target) for name, targets in graph.items() for target in targets]
    rooms = [(room_of(name), room_of(target), name, target) for name, target in arrows]
    wrong = [
        f"{name} imports {target}" for mine, its, name, target in rooms if mine != its and FLOOR[its] >= FLOOR[mine]
    ]
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        wrong.append("circle: " + " -> ".join(reversed(error.args[1])))
    return sorted(wrong)


def test_imports_point_down_and_make_no_circle() -> None:
    assert wrong_imports(project_modules()) == []


def test_every_folder_of_utils_has_its_floor() -> None:
    folders = {file.parent.name for file in (PROJECT / "utils").glob("*/*.py")}
    assert folders == FLOOR.keys() - {"utils", "outside"}


@pytest.mark.parametrize(
    ("module", "line", "complaint"),
    [
        ("utils.data.cache", "from utils.distributed import rank", "utils.data.cache imports utils.distributed"),
        ("utils.distributed.ddp", "import utils.data.cache", "utils.distributed.ddp imports utils.data.cache"),
        ("utils.engine.loop", "from utils.yolo import loss", "utils.engine.loop imports utils.yolo.loss"),
        ("utils.common.files", "from utils import launch", "utils.common.files imports utils.training.launch"),
        ("utils.training.launch", "import benchmark_ddp", "utils.training.launch imports benchmark_ddp"),
        ("utils.data.cache", "from utils.data.images import read", "circle: utils.data.cache -> utils.data.images -> "),
    ],
)
@pytest.mark.parametrize("place", ["{}", "def later():\n    {}", "if TYPE_CHECKING:\n    {}"])
def test_a_wrong_import_is_named_wherever_it_stands(module: str, line: str, complaint: str, place: str) -> None:
    names = ("data.cache", "distributed", "distributed.ddp", "engine.loop", "yolo.loss", "common.files", "launch")
    modules = {**{f"utils.{name}": "" for name in names}, "benchmark_ddp": ""}
    modules["utils.data.images"] = "from utils.data import cache"
    assert wrong_imports(modules) == []
    (found,) = wrong_imports({**modules, module: place.format(line)})
    assert found.startswith(complaint)
