"""What no source file of the project may contain: each rule parses the code, and is shown to catch a planted example."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import PROJECT

# (file, rule): why it is allowed there. Tests may do what the project must not, to show what would happen.
ALLOWED = {
    ("benchmarks/gpu/wheels.py", "extract_all"): "wheels that the user names; zipfile drops `..` and absolute paths",
    ("recipes/training_engine/launching.py", "pickle"): "lambdas on their way to processes that it starts itself",
    ("tests/data/test_cache.py", "pickle"): "its own object, on its way to a worker process",
    ("tests/sources/download/test_web.py", "plain_http"): "a redirect that must be refused",
    ("tests/security/test_run.py", "plain_http"): "addresses that must be refused, and a proxy with a secret",
    ("tests/security/test_weights.py", "torch_load"): "the controls: opened without care the payload runs",
    ("utils/predict/maps/xmp.py", "plain_http"): "the name of an XML namespace; nothing is fetched",
    ("tests/yolo/test_model.py", "torch_load"): "the control: opened without care the payload runs",
}
CODE_RUNNERS = {"eval", "exec", "compile", "__import__"}
OBJECT_COLLECTIVES = {"broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list", "send_object_list", "recv_object_list"}  # fmt: skip
SHELLS = {"os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput", "commands.getoutput"}
SAFE_YAML = {"safe_load", "safe_load_all", "safe_dump", "safe_dump_all", "YAMLError"}


@dataclass(frozen=True)
class Finding:
    """A rule that a line breaks."""

    line: int
    rule: str


def findings_in(source: str) -> list[Finding]:
    """Return what a Python file must not contain."""
    tree = ast.parse(source)
    aliases = _imported_names(tree)
    found = [
        Finding(getattr(node, "lineno", 0), rule) for node in ast.walk(tree) for rule in _broken_rules(node, aliases)
    ]
    return sorted(found, key=lambda finding: finding.line)


def _imported_names(tree: ast.Module) -> dict[str, str]:
    """Map each imported name to the full name that it stands for."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update({item.asname: item.name for item in node.names if item.asname})
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.update({item.asname or item.name: f"{node.module}.{item.name}" for item in node.names})
    return names


def _full_name(node: ast.expr, aliases: dict[str, str]) -> str:
    if isinstance(node, ast.Name):
        return aliases.get(node.id, node.id)
    if isinstance(node, ast.Attribute):
        return f"{_full_name(node.value, aliases)}.{node.attr}"
    return "?"


def _broken_rules(node: ast.AST, aliases: dict[str, str]) -> Iterator[str]:
    if isinstance(node, ast.Call):
        yield from _broken_by_call(node, _full_name(node.func, aliases))
    elif isinstance(node, ast.ImportFrom | ast.Import):
        modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else [item.name for item in node.names]
        if {module.split(".")[0] for module in modules} & {
            "cPickle",
            "dill",
            "cloudpickle",
            "marshal",
            "shelve",
            "joblib",
        }:
            yield "pickle"
    elif isinstance(node, ast.ExceptHandler):
        if node.type is None:
            yield "bare_except"
        if all(isinstance(line, ast.Pass) or _is_ellipsis(line) for line in node.body):
            yield "except_pass"
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        if re.match(r"http://(?!127\.0\.0\.1|localhost|\[::1\]|www\.w3\.org)[\w{]", node.value):
            yield "plain_http"
    elif isinstance(node, ast.Attribute | ast.Name):
        name = _full_name(node, aliases)
        if name.endswith(("._create_unverified_context", ".CERT_NONE", ".disable_warnings")):
            yield "unverified_tls"


def _broken_by_call(node: ast.Call, name: str) -> Iterator[str]:
    last = name.rpartition(".")[2]
    options = {option.arg: option.value for option in node.keywords}
    if name in CODE_RUNNERS or name.removeprefix("builtins.") in CODE_RUNNERS:
        yield "runs_code"
    if last in OBJECT_COLLECTIVES:
        yield "object_collective"
    if name in ("torch.load", "torch.hub.load", "torch.hub.load_state_dict_from_url") and not _is(
        options.get("weights_only"), True
    ):
        yield "torch_load"
    if name in ("pickle.load", "pickle.loads", "pickle.Unpickler"):
        yield "pickle"
    if name in ("numpy.load", "np.load") and _is(options.get("allow_pickle"), True):
        yield "pickle"
    if name.startswith("yaml.") and last not in SAFE_YAML:
        yield "unsafe_yaml"
    if name in SHELLS or ("shell" in options and not _is(options["shell"], False)):
        yield "shell"
    if "verify" in options and _is(options["verify"], False):
        yield "unverified_tls"
    if last in ("extractall", "unpack_archive"):
        yield "extract_all"
    if name == "tempfile.mktemp":
        yield "temporary_name"


def _is(node: ast.expr | None, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def _is_ellipsis(line: ast.stmt) -> bool:
    return isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant) and line.value.value is ...


SHELL_RULES = {
    "eval": re.compile(r"(^|[;&|(\s])eval\s"),
    "download_and_run": re.compile(r"(curl|wget)\b[^\n]*\|\s*(sudo\s+)?(ba|da|z)?sh\b|(ba|da|z)?sh\s+<\(\s*(curl|wget)|(source|\.)\s+<\(\s*(curl|wget)"),
    "insecure_transfer": re.compile(r"curl\s([^\n]*\s)?(-k\b|--insecure)|wget\s[^\n]*--no-check-certificate|--trusted-host"),
    "unhashed_install": re.compile(r"pip3? install (?![^\n]*--require-hashes)[^\n]*(requirements\.lock|https?://)"),
}  # fmt: skip


def shell_findings_in(source: str) -> list[str]:
    """Return the rules that a shell script or Makefile breaks; its comments do not count."""
    code = "\n".join(re.sub(r"(^|\s)#.*$", "", line) for line in source.splitlines())
    return [name for name, pattern in SHELL_RULES.items() if pattern.search(code)]


def project_files(*patterns: str) -> list[Path]:
    """Return the project's own files: what lies beside the scripts, not what was installed, built or downloaded."""
    ignored = {".venv", "data", "models", "outputs", ".git", ".mypy_cache", ".pytest_cache", ".ruff_cache", "build"}
    found = [path for pattern in patterns for path in PROJECT.rglob(pattern)]
    return sorted(path for path in found if not ignored & set(path.relative_to(PROJECT).parts))


def test_no_source_file_contains_what_is_forbidden() -> None:
    files = project_files("*.py")
    assert len(files) > 100
    broken = [
        f"{name}:{finding.line}: {finding.rule}"
        for file in files
        for name in [file.relative_to(PROJECT).as_posix()]
        for finding in findings_in(file.read_text(encoding="utf-8"))
        if (name, finding.rule) not in ALLOWED
    ]
    assert broken == []


def test_every_exception_is_still_needed() -> None:
    for name, rule in ALLOWED:
        assert rule in {finding.rule for finding in findings_in((PROJECT / name).read_text(encoding="utf-8"))}, name


def test_no_shell_script_contains_what_is_forbidden() -> None:
    files = project_files("*.sh", "Makefile", "*.yml", "*.yaml", "Dockerfile*", "*.sbatch")
    assert {"train_ddp.sh", "demo.sh", "Makefile"} <= {file.name for file in files}
    assert {file.name: shell_findings_in(file.read_text(encoding="utf-8")) for file in files} == {
        file.name: [] for file in files
    }


@pytest.mark.parametrize(
    ("planted", "rule"),
    [
        ("eval(text)", "runs_code"),
        ("exec(text)", "runs_code"),
        ("compile(text, 'x', 'exec')", "runs_code"),
        ("import builtins\nbuiltins.eval(text)", "runs_code"),
        ("import pickle\npickle.loads(data)", "pickle"),
        ("import dill", "pickle"),
        ("from pickle import load as read\nread(file)", "pickle"),
        ("import numpy as np\nnp.load(file, allow_pickle=True)", "pickle"),
        ("import torch\ntorch.load(file)", "torch_load"),
        ("import torch\ntorch.load(file, weights_only=False)", "torch_load"),
        ("import torch\ntorch.load(file, weights_only=flag)", "torch_load"),
        ("from torch import load as read\nread(file)", "torch_load"),
        ("import torch.distributed as dist\ndist.broadcast_object_list(things)", "object_collective"),
        ("from torch.distributed import all_gather_object\nall_gather_object(a, b)", "object_collective"),
        ("dist.gather_object(a)", "object_collective"),
        ("dist.scatter_object_list(a, b)", "object_collective"),
        ("import yaml\nyaml.load(text)", "unsafe_yaml"),
        ("import yaml\nyaml.load(text, Loader=yaml.UnsafeLoader)", "unsafe_yaml"),
        ("from yaml import load\nload(text)", "unsafe_yaml"),
        ("import subprocess\nsubprocess.run(words, shell=True)", "shell"),
        ("import os\nos.system(words)", "shell"),
        ("from os import system as run\nrun(words)", "shell"),
        ("requests.get(url, verify=False)", "unverified_tls"),
        ("import ssl\nssl._create_unverified_context()", "unverified_tls"),
        ("context.verify_mode = ssl.CERT_NONE", "unverified_tls"),
        ("requests.get('http://example.org/a')", "plain_http"),
        ("try:\n    work()\nexcept:\n    raise", "bare_except"),
        ("try:\n    work()\nexcept Exception:\n    pass", "except_pass"),
        ("try:\n    work()\nexcept ValueError:\n    ...", "except_pass"),
        ("archive.extractall(folder)", "extract_all"),
        ("import tempfile\ntempfile.mktemp()", "temporary_name"),
    ],
)
def test_each_rule_catches_a_planted_example(planted: str, rule: str) -> None:
    assert rule in {finding.rule for finding in findings_in(planted)}


@pytest.mark.parametrize(
    "honest",
    [
        "model.eval()",
        "import re\nre.compile(text)",
        "import torch\ntorch.compile(model)\ntorch.load(file, weights_only=True)",
        "import yaml\nyaml.safe_load(text)",
        "requests.get('https://example.org')\nurl = 'http://127.0.0.1:80/'",
        "try:\n    work()\nexcept ValueError:\n    value = None",
        "import ast\nast.literal_eval(text)",
    ],
)
def test_no_rule_catches_what_is_right(honest: str) -> None:
    assert findings_in(honest) == []


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
