"""What the benchmarks refuse: one line on stderr and code 2."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.gpu.__main__ import GpuConfig
from benchmarks.input_pipeline import InputConfig
from benchmarks.recipe import RecipeConfig
from benchmarks.train_step import StepConfig
from benchmarks.vs_ultralytics import ComparisonConfig
from utils.common.config import parse_config


@pytest.mark.parametrize(
    ("config", "flags", "said"),
    [
        (ComparisonConfig, "--seeds 1 1", "--seeds 1 1: must be different numbers"),
        (ComparisonConfig, "--epochs 9 --close-mosaic 5", "--close-mosaic 5"),
        (ComparisonConfig, "--epochs 0", "--epochs 0"),
        (ComparisonConfig, "--sample-image 20", "did you mean --sample-images"),
        (InputConfig, "--originals a.yaml --raw b", "--originals and --raw"),
        (InputConfig, "--rounds 0", "--rounds 0"),
        (StepConfig, "--img-size 100", "--img-size 100: must be a multiple of 32 and at least 64"),
        (StepConfig, "--objects -1", "--objects -1: must be at least 0"),
        (GpuConfig, "--only ncll", "--only ncll: there is same_as_cpu data"),
        (RecipeConfig, "--recipes nameless", 'must be "name: options'),
        (RecipeConfig, "--recipes :", 'must be "name: options'),
        (RecipeConfig, "--recipes a: a:", "must have different names"),
        (RecipeConfig, "--recipes ultralytics:", "must have different names, none of them ultralytics"),
        (RecipeConfig, "--sets shrooms", "neither one of mushrooms"),
    ],
)
def test_wrong_options_are_one_line_and_code_2(
    config: Any, flags: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as leaving:
        parse_config(config, "Compare", flags.split())
    (line,) = capsys.readouterr().err.splitlines()
    assert leaving.value.code == 2
    assert said in line
