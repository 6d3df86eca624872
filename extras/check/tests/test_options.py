"""Every option of check_data.py acts, or says that it cannot; a place that cannot be written; the check on a GPU."""

from pathlib import Path

import pytest

import check_data
from tests.commands.test_pretended_gpu import few, run  # noqa: F401 # few: a fixture
from tests.support.option_scripts import TILES, TILING, Script
from tests.support.option_walk import Walk
from tests.support.plugin import TrainedRun, run_main
from utils.common.errors import UserError
from utils.common.extras import require_extra

SCRIPT = Script(
    "check_data",
    "CheckConfig",
    home="extras.check.command",
    real=("extras.check.command",),
    modes=(("--model=m",),),
    values=TILES,
    kept={**TILING, "require_extra": require_extra},
    stubs=("print_results", "first_error"),
    tested={"world_size": 1},
)


def test_every_option_acts_or_is_refused_in_every_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    walk = Walk(SCRIPT, monkeypatch)
    acted, idle = walk.all()
    assert not idle
    assert sorted(acted) == sorted(walk.options)
    assert walk.unneeded_rules() == set()


@pytest.mark.parametrize("output", ["file", "file/folder", "/proc/results", "/proc/self"])
def test_an_output_that_is_no_folder_is_refused_before_the_work(
    output: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("a result of another program")
    place = tmp_path / output
    with pytest.raises(UserError, match=rf"^--output {place}: .+; name a folder in which files can be written$"):
        run_main(check_data, monkeypatch, "--output", place)
    assert [file.read_text() for file in tmp_path.iterdir()] == ["a result of another program"]


def test_the_check_runs_on_a_gpu(few: TrainedRun, tmp_path: Path) -> None:  # noqa: F811
    line = f"--model {few.folder}/best.pt --data {few.data} --tiles 96 --output {tmp_path}/out --tolerate"
    (seen,) = run(tmp_path, 1, "check_data", line)
    assert seen["code"] == 0, (tmp_path / "printed.txt").read_text()
    assert seen["copies"] > 0
