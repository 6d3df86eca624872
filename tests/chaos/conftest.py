"""Attacks on real trainings: `make chaos`, or `python -m pytest tests/chaos -m chaos [--quick] [-k
r13]`.

An attack is a test marked `chaos(full, quick)`, its numbers of trials. Without `-m chaos` only
those marked `always=True` run, with the quick number.
"""

import faulthandler
import os
import random
import statistics
from collections import defaultdict
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from benchmarks.jobs import draw_sample
from tests.chaos.trainings import small_flags, train_undisturbed
from tests.support.ranks import run_ranks

LIMIT_S = 1800  # of one trial
LAUNCHERS_PREFIXES = ("SLURM", "PET_", "OMPI_", "TORCHELASTIC", "GLOO_", "NCCL_")
LAUNCHERS_NAMES = (
    *(
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "NNODES",
        "NODE_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
    ),
    *(
        "DRY_RUN",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE",
        "PROJECT",
        "RUN_FOLDER",
        "PROCESSES",
        "MAX_REQUEUES",
    ),
)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("chaos")
    group.addoption("--quick", action="store_true", help="only a few trials of each attack")
    group.addoption("--trials", type=int, help="this many trials of each attack")
    group.addoption("--seed", type=int, default=0, help="seed of the random moments and victims")
    group.addoption("--minutes", type=float, default=10.0, help="length of the long training (R25)")


def is_chosen(config: pytest.Config) -> bool:
    return "chaos" in config.option.markexpr


def pytest_configure(config: pytest.Config) -> None:
    """All attacks take longer than the suite may."""
    if is_chosen(config):
        faulthandler.cancel_dump_traceback_later()


def count_of(config: pytest.Config, attack: pytest.Mark) -> int:
    full, quick = attack.args
    wanted = quick if config.getoption("quick", True) or not is_chosen(config) else full
    return int(config.getoption("trials", None) or wanted)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    attack = metafunc.definition.get_closest_marker("chaos")
    if attack and "trial" in metafunc.fixturenames:
        metafunc.parametrize("trial", range(count_of(metafunc.config, attack)))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave attacks out of the suite, but for those that it always makes."""
    for item in items:
        if item.get_closest_marker("chaos") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(LIMIT_S))
    if not is_chosen(config):
        attacks = [(item, item.get_closest_marker("chaos")) for item in items]
        items[:] = [
            item for item, attack in attacks if attack is None or attack.kwargs.get("always")
        ]


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print a row for each attack: trials passed, and median and maximum of what it measured."""
    if not is_chosen(config):
        return
    passes: dict[str, list[bool]] = defaultdict(list)
    figures: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for report in (
        *terminalreporter.stats.get("passed", ()),
        *terminalreporter.stats.get("failed", ()),
    ):
        name = report.nodeid.partition("::test_")[2].partition("[")[0]
        passes[name].append(report.passed)
        for what, value in report.user_properties:
            figures[name][what].append(value)
    for name, passed in passes.items():
        measured = (
            f"{what} {statistics.median(values):.4g} (most {max(values):.4g})"
            for what, values in figures[name].items()
        )
        terminalreporter.write_line(
            f"| {name} | {sum(passed)}/{len(passed)} | {', '.join(measured)} |"
        )


@pytest.fixture
def times(request: pytest.FixtureRequest) -> int:
    """How often to attack the same training."""
    attack = request.node.get_closest_marker("chaos")
    return count_of(request.config, attack)


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> random.Random:
    """The random moments and victims of this trial."""
    return random.Random(f"{request.config.getoption('seed', 0)} {request.node.name}")


@pytest.fixture(scope="session", autouse=True)
def _no_launcher() -> None:
    for name in list(os.environ):
        if name in LAUNCHERS_NAMES or name.startswith(LAUNCHERS_PREFIXES):
            del os.environ[name]


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Train the small network undisturbed, once for the same options; return its run folder."""

    @cache
    def train(**options: Any) -> Path:
        folder = tmp_path_factory.mktemp("undisturbed")
        codes = run_ranks(
            train_undisturbed,
            2,
            small_flags(folder, step_s=0, **options),
            join=False,
            timeout_s=300,
        )
        assert codes == [0, 0]
        return folder / "run"

    return train


@pytest.fixture(scope="session")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Draw photographs, once for the same options; return their dataset.yaml."""
    return cache(
        lambda num_photos, **choices: draw_sample(
            tmp_path_factory.mktemp("sample"), num_photos, **choices
        )
    )
