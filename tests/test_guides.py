"""What the five guides promise (the frozen list tests/support/guides.yaml), and what the project
says of itself.
"""

import importlib
import re
import shlex
from collections.abc import Callable, Sequence
from functools import partial, reduce
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed.run import parse_args

import benchmark_ddp
from tests.support.plugin import PROJECT
from yolo_seg_ddp.training.config import TrainConfig
from yolo_seg_ddp.training.launch import read_launch
from yolo_seg_ddp.utils.config import parse_config, read_config
from yolo_seg_ddp.utils.cores import choose_threads_and_workers

SEEDS = PROJECT.parent / "shared" / "seeds"
GUIDES: dict[str, Any] = yaml.safe_load(
    (PROJECT / "tests/support/guides.yaml").read_text(encoding="utf-8")
)
Row = tuple[str, ...]


def rows(kind: str) -> list[Row]:
    return [(guide, *row) for guide, found in GUIDES.items() for row in found.get(kind, ())]


def commands() -> list[tuple[str, str, dict[str, Any]]]:
    """Return (guide, command, the options' values that the guide promises)."""
    found = [(guide, one) for guide, part in GUIDES.items() for one in part["commands"]]
    pairs = [(guide, one if isinstance(one, dict) else {one: {}}) for guide, one in found]
    return [(guide, command, promised) for guide, one in pairs for command, promised in one.items()]


# --- how each script reads its command line -------------------------------------------------------


def options_of(module: str, name: str, words: Sequence[str]) -> Any:
    return parse_config(getattr(importlib.import_module(module), name), "", list(words))


def read_student(words: Sequence[str]) -> Any:
    module = importlib.import_module("underwater_ir.student.train_student")
    return parse_config(module.StudentConfig, "", module.with_hyphens(list(words)))


def read_settings(words: Sequence[str]) -> Any:
    settings = importlib.import_module("recipes.compressed_ad.settings")
    return read_config(
        settings.Settings, PROJECT / "recipes/compressed_ad" / [*words, settings.DEFAULT_CONFIG][0]
    )


OPTIONS = {
    "benchmark_ddp": "BenchmarkConfig",
    "download_data": "DownloadConfig",
    "evaluate_model": "EvaluationConfig",
    "inference": "InferenceConfig",
    "parse_labels": "ParseConfig",
    "profile_gpu": "ProfileConfig",
    "test_ddp": "MachineCheckConfig",
}
READERS: dict[str, Callable[[Sequence[str]], Any]] = {
    **{f"{script}.py": partial(options_of, script, name) for script, name in OPTIONS.items()},
    "train_yolo_ddp.py": partial(options_of, "yolo_seg_ddp.training.config", "TrainConfig"),
    "recipes/crowd_bt/train.py": lambda words: importlib.import_module(
        "crowd_bt.options"
    ).read_options(words),
    "recipes/training_engine/distributed_training_example.py": partial(
        options_of, "distributed_training_example", "ExampleConfig"
    ),
    "recipes/compressed_ad/train.py": read_settings,
    "recipes/underwater_ir/underwater_ir/student/train_student.py": read_student,
}


def read_script(folder: str, script: str, words: Sequence[str]) -> Any:
    path = (PROJECT / folder / script).relative_to(PROJECT).as_posix()
    assert (PROJECT / path).is_file()
    return READERS[path](words)


def read_shell(folder: str, script: str, words: Sequence[str]) -> Any:
    """Read the command line of a shell script as it does, and its trainer's."""
    assert (PROJECT / folder / script).is_file()
    if folder == ".":
        return read_script(".", "train_yolo_ddp.py", read_launch(words, {}).trainer_arguments)
    if script.endswith("train_distributed.sh"):
        assert words[0].isdecimal()
        return read_script(folder, "train.py", ["--distributed", "--world-size", *words])
    assert len(words) <= 4
    assert all(word.isdecimal() for word in words)
    return None


def read_accelerate(folder: str, words: Sequence[str]) -> Any:
    from accelerate.commands.launch import launch_command_parser

    # It knows `auto`, and nothing else that accelerate does not.
    (shim,) = (PROJECT / folder / "bin").glob("accelerate")
    assert "--num_processes" in shim.read_text()
    asked = launch_command_parser().parse_args([word.replace("=auto", "=2") for word in words])
    if asked.config_file:
        assert (PROJECT / folder / asked.config_file).is_file()
    return read_script(folder, asked.training_script, asked.training_script_args)


def read(folder: str, line: str) -> Any:
    """Check a guide's command line, without running it; return the options of the script that it
    starts.
    """
    words = [
        word
        for word in shlex.split(line.replace("[other args...]", ""))
        if not re.match("[A-Z_]+=", word)
    ]
    program, *rest = words[1:] if words[0] == "bash" else words
    if program == "accelerate":
        assert rest[0] == "launch"
        return read_accelerate(folder, rest[1:])
    if program.endswith(".sh"):
        return read_shell(folder, program, rest)
    if rest[:2] in (["-m", "torch.distributed.run"], ["-m", "torch.distributed.launch"]):
        program, rest = "torchrun", rest[2:]
    if program == "torchrun":
        asked = parse_args(rest)
        rest = [
            *(["-m"] if asked.module else []),
            asked.training_script,
            *asked.training_script_args,
        ]
    if rest[0] == "-m":
        rest = [rest[1].replace(".", "/") + ".py", *rest[2:]]
    return read_script(folder, rest[0], rest[1:])


@pytest.mark.parametrize(("guide", "line", "promised"), commands())
def test_a_guides_command_is_taken_and_means_what_it_promises(
    guide: str, line: str, promised: dict[str, Any]
) -> None:
    options = read(GUIDES[guide]["folder"], line)
    expected = {
        name: tuple(value) if isinstance(value, list) else value for name, value in promised.items()
    }
    taken = {name: getattr(options, name) for name in promised}
    # An option that takes several values means with one what it meant before.
    single = {name: value[0] for name, value in taken.items() if value == (expected[name],)}
    assert taken | single == expected


def test_what_the_guides_say_of_defaults_in_words() -> None:
    assert [
        choose_threads_and_workers(1, None, device, cores=9)[1] for device in ("cpu", "cuda")
    ] == [2, 8]
    assert Path(PROJECT / TrainConfig().data).samefile(PROJECT / "dataset.yaml")
    assert benchmark_ddp.choose_counts(benchmark_ddp.BenchmarkConfig(), 8) == (1, 2, 4, 8)


# --- what is printed and written ------------------------------------------------------------------


@pytest.mark.parametrize(("guide", "line", "source", "test"), rows("printed"))
def test_a_guides_line_is_printed_and_a_test_sees_it(
    guide: str, line: str, source: str, test: str
) -> None:
    parts = [part.strip() for part in line.split("…")]
    printing, seeing = ((PROJECT / name).read_text(encoding="utf-8") for name in (source, test))
    assert [part for part in parts if part.removeprefix("✓ ") not in printing] == []
    assert max(parts, key=len).removeprefix("✓ ") in seeing.replace("\\", "")


@pytest.mark.parametrize(("guide", "name", "test"), rows("files"))
def test_a_guides_file_is_looked_for_by_a_test(guide: str, name: str, test: str) -> None:
    assert name in (PROJECT / test).read_text(encoding="utf-8")


@pytest.mark.parametrize(("guide", "name", "module"), rows("names"))
def test_a_guides_name_is_there(guide: str, name: str, module: str) -> None:
    assert reduce(getattr, name.split("."), importlib.import_module(module)) is not None


# --- whether the list is whole --------------------------------------------------------------------


def lines_of(guide: Path) -> list[str]:
    """Return the command lines of a guide's bash blocks, without comments and line breaks."""
    text = guide.read_text(encoding="utf-8").replace("\\\n", " ")
    blocks = re.findall(r"^\s*```bash\n(.*?)^\s*```\s*$", text, re.MULTILINE | re.DOTALL)
    lines = [
        " ".join(re.sub(r"\s+#.*|^\s*#.*", "", line).split())
        for block in blocks
        for line in block.splitlines()
    ]
    return [line for line in lines if line]


def test_the_list_has_every_command_of_the_guides_and_only_their_lines() -> None:
    files = {name: next(SEEDS.glob(f"{name[:3]}_*.txt"), None) for name in GUIDES}
    for name, file in files.items():
        if file is None:
            pytest.skip(
                "the guides themselves are not on this machine (put them at ../shared/seeds)"
            )
        text = file.read_text(encoding="utf-8")
        listed = {line for guide, line, _ in commands() if guide == name} | set(
            GUIDES[name]["others"]
        )
        assert set(lines_of(file)) == listed
        for kind in ("printed", "files", "names"):
            for row in GUIDES[name].get(kind, ()):
                parts = row[0].split(".")[-1:] if kind == "names" else row[0].split("…")
                assert all(part.strip() in text for part in parts), row


# --- the project's own pages ----------------------------------------------------------------------


def paths_in(tree: str) -> set[str]:
    """Return the first word of each line; an indented one lies in the last folder that is indented
    less.
    """
    paths, folders = set(), [(-1, "")]
    for line in tree.strip().splitlines():
        name, indent = line.split()[0], len(line) - len(line.lstrip())
        while folders[-1][0] >= indent:
            folders.pop()
        path = folders[-1][1] + name
        paths.add(path)
        if name.endswith("/"):
            folders.append((indent, path))
    return paths


def test_the_tree_of_files_is_true() -> None:
    guide = (PROJECT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (tree,) = [block for block in guide.split("```")[1::2] if "\nyolo_seg_ddp/" in block]
    named = paths_in(tree)
    absent = {path for path in named if not (PROJECT / path).exists()}
    assert not absent, f"CONTRIBUTING.md names what is not there: {absent}"
    folders = {
        f"{file.parent.relative_to(PROJECT).as_posix()}/"
        for pattern in ("*", "extras/*")
        for file in PROJECT.glob(f"yolo_seg_ddp/{pattern}/__init__.py")
    }
    scripts = {file.name for kind in ("*.py", "*.sh") for file in PROJECT.glob(kind)}
    missing = (folders | scripts) - named
    assert not missing, f"CONTRIBUTING.md's tree does not name {missing}"


def test_each_page_is_linked_from_an_index_and_no_link_is_broken() -> None:
    indexes = [
        PROJECT / name for name in ("README.md", "docs/README.md", "docs/research/README.md")
    ]
    indexes += PROJECT.glob("yolo_seg_ddp/extras/*/README.md")
    pages = [PROJECT / "README.md", PROJECT / "CONTRIBUTING.md", *(PROJECT / "docs").rglob("*.md")]
    pages += PROJECT.glob("yolo_seg_ddp/extras/*/*.md")
    links = {
        page: set(re.findall(r"\]\(([^)#\s:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")))
        for page in pages
    }
    broken = {
        (page.name, link)
        for page in pages
        for link in links[page]
        if not (page.parent / link).exists()
    }
    assert not broken
    linked = {(page.parent / link).resolve() for page in indexes for link in links[page]}
    assert set(pages[2:]) <= linked


# The end of a test run prints them (support/plugin.py).
REASON = re.compile(r'(?:reason=|pytest\.skip\()(f?"[^"]*")')


def test_every_reason_to_skip_a_test_says_how_to_have_it() -> None:
    reasons = [
        (file.name, reason)
        for file in sorted((PROJECT / "tests").rglob("*.py"))
        for line in file.read_text(encoding="utf-8").splitlines()
        if re.search(r"skip\(|skipif\(|importorskip\(", line)
        for reason in REASON.findall(line)
    ]
    assert len(reasons) >= 8
    without = [(name, reason) for name, reason in reasons if "(" not in reason]
    if without:
        pytest.fail(f"no remedy in parentheses: {without}")
