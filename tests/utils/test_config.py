"""Configuration: default < YAML file < command line, and what is wrong is named in one line."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from inference import InferenceConfig
from yolo_seg_ddp.run.folder import resume_arguments
from yolo_seg_ddp.training.config import TrainConfig
from yolo_seg_ddp.utils.config import config_of, parse_config, read_config
from yolo_seg_ddp.utils.errors import UsageError
from yolo_seg_ddp.utils.option_names import nearest
from yolo_seg_ddp.utils.options import Options, option, to_dict


@dataclass(frozen=True)
class Settings(Options):
    """Every kind of option the scripts use, some of which other programs call otherwise."""

    model: str = option("small", "which model; 100 % of them")
    batch_size: int = option(16, "images", words={"auto": 0}, at_least=0)
    img_size: int = option(640, "pixels")
    num_workers: int = option(8, "processes")
    epochs: int = option(3, "passes", at_least=1)
    lr: float = option(0.01, "learning rate")
    ema: bool = option(True, "average the weights")
    sizes: tuple[int, ...] = option((32, 64), "sizes in pixels")
    seed: int | None = option(None, "seed")
    save_dir: str = option("models/first", "run folder", metavar="DIR")
    optimizer: str = option("auto", "which", choices=("auto", "sgd", "adamw"))
    config: str | None = option(None, "YAML file")


@dataclass(frozen=True)
class NeedsName(Options):
    """One option without a usable default."""

    run_name: str = option("", "name", required=True)
    config: str | None = option(None, "YAML file")


@dataclass(frozen=True)
class Dependent(Options):
    """Options that act only beside others."""

    windows: int = option(0, "windows")
    scale: float = option(1.0, "with windows", needs="windows")
    ema: bool = option(True, "average the weights")
    decay: float = option(0.9, "with ema", needs="ema", may_differ=True)
    mode: str = option("fast", "how", choices=("fast", "exact", "off"))
    tolerance: int = option(3, "with mode exact and windows", needs=("mode=exact", "windows"))
    overlap: float = option(0.2, "unless mode off", needs="not mode=off")
    size: int | None = option(
        None, "with ema or windows, 8 anywhere", needs="ema or windows or size=8"
    )
    folder: str = option("data", "not with windows", wants="not windows")
    sizes: tuple[int, ...] = option((1, 2), "with windows", wants="windows")
    resume: str | None = option(None, "a run")
    config: str | None = option(None, "YAML file")


def parse(tmp_path: Path, text: str | None, *arguments: str) -> Settings:
    if text is None:
        return parse_config(Settings, "test", list(arguments))
    file = tmp_path / "run.yaml"
    file.write_bytes(text.encode("latin-1"))
    return parse_config(Settings, "test", ["--config", str(file), *arguments])


def complaint(capsys: pytest.CaptureFixture[str], read: Callable[[], object]) -> str:
    """Return the one line that a wrong configuration ends in."""
    with pytest.raises(SystemExit) as leaving:
        read()
    captured = capsys.readouterr()
    assert leaving.value.code == 2
    assert captured.out == ""
    assert captured.err.count("\n") == 1, captured.err
    assert captured.err.endswith("\n")
    return captured.err


def test_sections_group_the_options_of_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = parse(tmp_path, "training:\n  epochs: 5\n  lr: 0.5\ndata: {seed: 7}\nmodel: large\n")
    assert (found.epochs, found.lr, found.seed, found.model) == (5, 0.5, 7, "large")
    assert "key epoch (did you mean epochs?)" in complaint(
        capsys, lambda: parse(tmp_path, "training: {epoch: 3}")
    )
    assert "lr: expected float, found a dict" in complaint(
        capsys, lambda: parse(tmp_path, "lr: {epochs: 3}")
    )


def test_defaults_then_yaml_then_command_line(tmp_path: Path) -> None:
    assert parse(tmp_path, None) == Settings()
    text = "epochs: 5\nlr: 0.5\nema: false\nsizes: [8]\nseed: 7\n"
    from_file = parse(tmp_path, text)
    assert (from_file.model, from_file.epochs, from_file.lr) == ("small", 5, 0.5)
    assert (from_file.ema, from_file.sizes, from_file.seed) == (False, (8,), 7)
    both = parse(
        tmp_path, text, "--epochs", "9", "--ema", "--model=large", "--sizes", "1", "2", "3"
    )
    assert (both.model, both.epochs, both.lr, both.ema, both.sizes) == (
        "large",
        9,
        0.5,
        True,
        (1, 2, 3),
    )
    assert parse(tmp_path, "epochs: 5", "--epochs", "3").epochs == 3  # the default, but given
    assert parse(tmp_path, "ema: true", "--no-ema").ema is False
    assert parse(tmp_path, "seed: null").seed is None
    of_other_type = parse(tmp_path, "epochs: 4.0\nlr: 1\n")
    assert [(type(value), value) for value in (of_other_type.epochs, of_other_type.lr)] == [
        (int, 4),
        (float, 1),
    ]


def test_dashes_in_keys_empty_files_and_a_required_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert parse(tmp_path, "") == Settings(config=str(tmp_path / "run.yaml"))
    file = tmp_path / "name.yaml"
    file.write_text("run-name: first\n")
    assert parse_config(NeedsName, "test", ["--config", str(file)]).run_name == "first"
    assert "--run-name is required" in complaint(
        capsys, lambda: parse_config(NeedsName, "test", [])
    )


@pytest.mark.parametrize(
    ("text", "arguments", "expected"),
    [
        (None, ("--epoch", "3"), "unknown argument --epoch (did you mean --epochs?)"),
        (None, ("--modle=small",), "unknown argument --modle=small (did you mean --model?)"),
        (None, ("--epochs", "many"), "many"),
        (None, ("--optimizer", "huge"), "huge"),
        (None, ("--epochs", "0"), "--epochs 0: must be at least 1"),
        *(
            (None, (f"--lr={odd}",), f"--lr {odd}: must be a finite number")
            for odd in ("inf", "nan", "-inf")
        ),
        (None, ("--sizes", "32", "-1"), "--sizes -1: must be at least 0"),
        (None, ("--seed=-1",), "--seed -1: must be at least 0"),
        (None, ("--epochs", "9" * 30), "must be a finite number below 1e+18"),
        ("lr: .inf", (), "--lr inf: must be a finite number"),
        ("seed: -1", (), "--seed -1: must be at least 0"),
        ("epochs: 1" + "0" * 400, (), "must be a finite number"),
        ("epochs: " + "[" * 100_000, (), "run.yaml: not valid YAML: nested too deeply"),
        (
            "a: &a [1]\nb: [" + "*a, " * 21 + "]",
            (),
            "run.yaml: not valid YAML: nested too deeply, or more than 20 aliases",
        ),
        ("epochs: !!bool x", (), "run.yaml: not valid YAML"),
        (None, ("--no-epochs",), "unknown argument --no-epochs"),
        (None, ("--config", "absent.yaml"), "--config absent.yaml: No such file"),
        ("epoch: 3", (), "run.yaml: unknown key epoch (did you mean epochs?)"),
        ("epochs: many", (), "run.yaml: epochs: expected int, found 'many'"),
        ("epochs: null", (), "run.yaml: epochs: expected int, found None"),
        ("epochs: 1.5", (), "run.yaml: epochs: expected int, found 1.5"),
        ("epochs: true", (), "run.yaml: epochs: expected int, found True"),
        ("ema: 1", (), "run.yaml: ema: expected bool, found 1"),
        ("lr: [1, 2]", (), "run.yaml: lr: expected float"),
        ("sizes: [1, x]", (), "run.yaml: sizes: expected int, found 'x'"),
        ("optimizer: huge", (), "run.yaml: optimizer: 'huge' is not one of auto, sgd, adamw"),
        ("epochs: 0", (), "--epochs 0: must be at least 1"),
        ("- epochs", (), "run.yaml: expected `key: value` lines, found a list"),
        ("epochs: [1", (), "run.yaml: not valid YAML"),
        ("epochs: .inf", (), "run.yaml: epochs: expected int, found inf"),
        ("epochs: .nan", (), "run.yaml: epochs: expected int, found nan"),
        ("# für", (), "run.yaml:1: byte 0xfc is not UTF-8"),
    ],
)
def test_what_is_wrong_is_named_in_one_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    text: str | None,
    arguments: tuple[str, ...],
    expected: str,
) -> None:
    assert expected in complaint(capsys, lambda: parse(tmp_path, text, *arguments))


def test_help_shows_every_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        parse_config(Settings, "Finds 90 %.\n\n    python find.py", ["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert leaving.value.code == 0
    assert text.startswith("python find.py Finds 90 %. [VALUE]")
    assert "100 % of them [small]" in text
    assert "sizes in pixels [32 64]" in text
    assert "--[no-]ema average the weights [on]" in text


def test_a_resolved_configuration_survives_the_way_through_yaml(tmp_path: Path) -> None:
    settings = Settings(model="large", lr=1e-5, ema=False, sizes=(5,), seed=2)
    assert parse(tmp_path, yaml.safe_dump(to_dict(settings))) == Settings(
        model="large", lr=1e-5, ema=False, sizes=(5,), seed=2, config=str(tmp_path / "run.yaml")
    )


@pytest.mark.parametrize(
    ("flags", "text", "expected"),
    [
        ("--optimizer AdamW", "", Settings(optimizer="adamw")),
        ("", "optimizer: SGD\n", Settings(optimizer="sgd")),
        ("--imgsz 320 --batch=4 --workers 2 --weights a.pt", "", Settings("a.pt", 4, 320, 2)),
        ("--img-size 64 --imgsz 320", "", Settings(img_size=320)),
        ("", "imgsz: 320\nbatch: 4\nworkers: 2\nweights: a.pt\n", Settings("a.pt", 4, 320, 2)),
        ("--batch 8", "batch_size: 4\n", Settings(batch_size=8)),
        ("--project runs --name second", "", Settings(save_dir="runs/second")),
        ("--project runs", "", Settings(save_dir="runs/first")),
        ("--name second", "", Settings(save_dir="models/second")),
        ("", "project: runs\nname: second\n", Settings(save_dir="runs/second")),
        ("--save-dir here", "project: runs\nname: second\n", Settings(save_dir="here")),
    ],
)
def test_ultralytics_names_are_taken_for_ours(
    flags: str, text: str, expected: Settings, tmp_path: Path
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    words = ["--config", str(file), *flags.split()]
    assert parse_config(Settings, "test", words) == replace(expected, config=str(file))


def test_a_folder_named_twice_is_refused_and_the_help_shows_each_name_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    error = complaint(
        capsys, lambda: parse_config(Settings, "test", ["--name", "a", "--save-dir", "b"])
    )
    assert "--name and --save-dir name the same folder: give one of them" in error
    with pytest.raises(SystemExit):
        parse_config(Settings, "test", ["--help"])
    options = capsys.readouterr().out.partition("options:")[2]
    for flag in ("--imgsz", "--batch", "--workers", "--weights", "--project", "--name"):
        assert len(re.findall(rf"{flag}\b(?!-)", options)) == 1, flag


def test_python_values_become_the_same_options_and_errors_are_raised() -> None:
    values: dict[str, Any] = {"imgsz": 320, "ema": False, "model": None, "name": Path("second")}
    assert config_of(Settings, values) == Settings(
        img_size=320, ema=False, save_dir="models/second"
    )
    assert config_of(Settings, {"sizes": [1, 2]}).sizes == (1, 2)
    for values, line in (
        ({"modle": "x"}, r"unknown argument --modle=x \(did you mean --model\?\)"),
        ({"batch": "x"}, "batch: expected int, found 'x'"),
        ({"batch": -1}, "--batch-size -1: must be at least 0 or auto"),
        ({"optimizer": "Adam"}, "optimizer: 'Adam' is not one of"),
    ):
        with pytest.raises(UsageError, match=line):
            config_of(Settings, values)


@pytest.mark.parametrize(
    ("word", "advice"),
    [
        *(
            ("--modle", "--model"),
            ("--image_size", "--img-size"),
            ("--num-worker", "--num-workers"),
        ),
        *(
            ("--img", "--imgsz"),
            ("--rect", ""),
            ("--nmae", "--name"),
            ("--cos_lr", ""),
            ("zzz", ""),
        ),
    ],
)
def test_only_what_is_spelt_nearly_alike_is_advised(word: str, advice: str) -> None:
    known = [
        "--model",
        "--img-size",
        "--imgsz",
        "--num-workers",
        "--project",
        "--name",
        "--colour",
        "--epochs",
    ]
    assert nearest(word, known) == (f" (did you mean {advice}?)" if advice else "")
    assert nearest("--name", ["--amp"]) == ""


@pytest.mark.parametrize(
    ("options", "flags", "advice"),
    [
        (TrainConfig, "--lr0 0.01", " (did you mean --lr?)"),
        (TrainConfig, "--half", "; --amp auto computes in half precision"),
        (TrainConfig, "--augment", "; training always augments"),
        (TrainConfig, "--classes 0 1", "; python parse_labels.py --classes"),
        (InferenceConfig, "--augment", "; predictions are made once"),
        (
            InferenceConfig,
            "--show",
            "; no window opens; the annotated pictures, or the film, are written to --output",
        ),
        (InferenceConfig, "--save_txt", "; pictures, labels/ and predictions.json are always"),
        (InferenceConfig, "--cache ram", " -- see"),
    ],
)
def test_what_people_type_elsewhere_is_told_the_way_here(
    options: type, flags: str, advice: str, capsys: pytest.CaptureFixture[str]
) -> None:
    error = complaint(capsys, lambda: parse_config(options, "test", flags.split()))
    assert f"unknown argument {flags.split()[0]}{advice}" in error


def test_a_cache_in_memory_is_the_packed_one_and_a_file_is_told_the_way_too(tmp_path: Path) -> None:
    assert parse_config(TrainConfig, "test", ["--cache", "ram"]).cache == "packed"
    (tmp_path / "run.yaml").write_text("half: true")
    with pytest.raises(UsageError, match="unknown key half; --amp auto"):
        read_config(TrainConfig, tmp_path / "run.yaml")
    for words in (["--resume"], ["--resume", "--epochs", "3"]):
        with pytest.raises(UsageError, match="--resume needs the run's folder"):
            resume_arguments(words)


def test_a_file_may_include_others_which_it_overrides(tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "first.yaml").write_text("lr: 0.5\nepochs: 2\nmodel: large\n")
    (tmp_path / "parts" / "second.yaml").write_text("include: third.yaml\nlr: 0.25\n")
    (tmp_path / "parts" / "third.yaml").write_text("seed: 3\nlr: 0.125\n")
    text = "epochs: 9\ninclude: [parts/first.yaml, parts/second.yaml]"
    both = parse(tmp_path, text, "--model", "small")
    assert (both.epochs, both.lr, both.seed, both.model) == (9, 0.25, 3, "small")
    alone = read_config(Settings, tmp_path / "run.yaml")
    assert (alone.epochs, alone.lr, alone.seed, alone.model) == (9, 0.25, 3, "large")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("include: run.yaml", "run.yaml: include: run.yaml includes this file in turn"),
        ("include: absent.yaml", "absent.yaml: No such file"),
        ("epochs: 0", "run.yaml: epochs 0: must be at least 1"),
        ("epoch: 3", "run.yaml: unknown key epoch (did you mean epochs?)"),
    ],
)
def test_a_file_alone_is_refused_without_naming_a_flag(
    tmp_path: Path, text: str, expected: str
) -> None:
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(UsageError) as caught:
        read_config(Settings, tmp_path / "run.yaml")
    assert expected in str(caught.value)
    assert "--" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("--scale 0.5", "--scale has no effect without --windows"),
        ("--no-ema --decay 0.5", "--decay has no effect with --no-ema"),
        ("--tolerance 4", "--tolerance has no effect without --mode exact"),
        ("--tolerance 4 --mode off", "--tolerance has no effect with --mode off"),
        ("--tolerance 4 --mode exact", "--tolerance has no effect without --windows"),
        ("--overlap 0 --mode off", "--overlap has no effect with --mode off"),
        ("--size 9 --no-ema", "--size has no effect with --no-ema and without --windows"),
        (
            "--scale 0.5 --tolerance 4",
            "effect without --windows; --tolerance has no effect without --mode exact",
        ),
    ],
)
def test_an_option_that_cannot_act_is_refused(
    capsys: pytest.CaptureFixture[str], arguments: str, reason: str
) -> None:
    error = complaint(capsys, lambda: parse_config(Dependent, "test", arguments.split()))
    assert f"{reason} -- see" in error


@pytest.mark.parametrize(
    "arguments",
    [
        *(
            "--windows 2 --scale 0.5",
            "--scale 1",
            "--decay 0.5",
            "--tolerance 4 --mode exact --windows 2",
        ),
        *(
            "--overlap 0.5",
            "--size 8 --no-ema",
            "--size 9 --no-ema --windows 1",
            "--folder other",
            "--sizes 1 2",
        ),
    ],
)
def test_an_option_that_acts_or_has_its_default_is_silent(
    capsys: pytest.CaptureFixture[str], arguments: str
) -> None:
    parse_config(Dependent, "test", arguments.split())
    assert capsys.readouterr() == ("", "")


def test_what_guides_pass_anyway_is_a_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert parse_config(Dependent, "test", ["--folder", "x", "--windows", "2"]).folder == "x"
    assert capsys.readouterr().err == "WARNING: --folder has no effect with --windows\n"
    assert parse_config(Dependent, "test", ["--sizes", "5"]).sizes == (5,)
    assert capsys.readouterr().err == "WARNING: --sizes has no effect without --windows\n"
    monkeypatch.setenv("RANK", "1")
    parse_config(Dependent, "test", ["--folder", "x", "--windows", "2"])
    assert capsys.readouterr().err == ""


def test_an_options_file_meets_one_line_a_resumed_run_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(to_dict(Dependent(windows=2, scale=0.5, decay=0.5))))
    assert parse_config(Dependent, "test", ["--config", str(file)]).scale == 0.5
    assert capsys.readouterr().err == ""
    overridden = ["--config", str(file), "--windows", "0"]
    assert parse_config(Dependent, "test", overridden).windows == 0
    assert (
        capsys.readouterr().err
        == f"WARNING: --config {file}: --scale has no effect without --windows\n"
    )
    parse_config(Dependent, "test", [*overridden, "--resume", "run"])
    assert capsys.readouterr().err == ""
    with pytest.raises(SystemExit):
        parse_config(Dependent, "test", [*overridden, "--scale", "0.25"])
    file.write_text("scale: 0.5\n")
    assert read_config(Dependent, file).scale == 0.5
    assert f"WARNING: {file}: --scale has no effect" in capsys.readouterr().err
