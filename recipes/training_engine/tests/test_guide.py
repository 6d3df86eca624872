"""The code of reference.md runs as printed, on two processes with a pretended GPU each, and is the
guide's.
"""

import os
import re
import sys
from pathlib import Path
from subprocess import PIPE, STDOUT, Popen

import pytest
import torch

from tests.support.plugin import PRETENCE, PROJECT, free_port
from tests.support.recipes import RECIPES, assert_equal

FOLDER = RECIPES / "training_engine"
SEEDS = PROJECT.parent / "shared" / "seeds"
# of the Python blocks that the guide has
METHOD_1, METHOD_2, METRIC, MIXED_PRECISION, AVERAGE = range(5)

# What the guide leaves to its reader.
YOURS = """
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)

class YourModel(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))

    def forward(self, x):
        if self.training:
            print(f"first of a batch: {float(x[0, 0])}", flush=True)
        return super().forward(x)

def points(number, seed):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(number) % 2
    points = torch.randn(number, 4, generator=generator) + 2 * labels[:, None] - 1
    return TensorDataset(points, labels)

train_dataset, val_dataset = points(64, 0), points(17, 1)
"""


def code_blocks(text: str) -> list[tuple[str, str]]:
    """Return (language, code) of each fenced block."""
    return re.findall(r"^```(\w+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def guides_blocks() -> list[str]:
    """Return the Python blocks that the guide has too; reference.md marks its
    own with a comment.
    """
    found = code_blocks((FOLDER / "reference.md").read_text(encoding="utf-8"))
    return [
        code
        for language, code in found
        if language == "python" and not code.startswith("# not in the guide")
    ]


def start(script: Path, *arguments: str, **environment: str) -> Popen[str]:
    search = os.pathsep.join(
        filter(None, [str(FOLDER), str(PRETENCE), os.environ.get("PYTHONPATH")])
    )
    variables = {**os.environ, "PYTHONPATH": search, "PRETEND_GPUS": "2", **environment}
    command = [sys.executable, script.name, *arguments]
    return Popen(command, cwd=script.parent, env=variables, text=True, stdout=PIPE, stderr=STDOUT)


def finish(process: Popen[str]) -> str:
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    return output


def first_samples(output: str) -> list[str]:
    """Return a number of the first sample of each training batch.

    Lines of two ranks may have become one.
    """
    return re.findall(r"first of a batch: (-?\d+\.\d+(?:e-?\d+)?)", output)


def test_the_reference_has_every_code_block_of_the_guide() -> None:
    guides = sorted(SEEDS.glob("002_*.txt"))
    if not guides:
        pytest.skip("the guide itself is not on this machine (put it at ../shared/seeds)")
    ours = code_blocks((FOLDER / "reference.md").read_text(encoding="utf-8"))
    theirs = code_blocks(guides[0].read_text(encoding="utf-8"))
    assert len(theirs) == 7
    assert [block for block in theirs if block not in ours] == []


def test_method_1_and_the_advanced_blocks_run_as_printed_in_two_processes(tmp_path: Path) -> None:
    blocks = guides_blocks()
    before, after = blocks[METHOD_1].split("# Create training engine")
    middle, cleanup = after.split("# Cleanup")
    script = tmp_path / "method_1.py"
    parts = [
        YOURS,
        "rank, world_size = int(sys.argv[1]), 2\n"
        "device, batch_size, num_epochs, some_value = f'cuda:{rank}', 4, 3, rank\n",
        before,
        "optimizer, criterion = torch.optim.SGD(model.parameters(), lr=0.1), "
        "nn.CrossEntropyLoss()\n"
        "scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2)\n",
        "# Create training engine" + middle,
        "assert isinstance(engine.model, DDP) and len(history['val_accuracy']) == 3\n",
        "print('trained', flush=True)\n",
        blocks[METRIC],
        "assert reduced_metric.item() == 0.5\n",
        blocks[MIXED_PRECISION],
        "assert engine.options.precision == 'auto'\n",
        blocks[AVERAGE],
        "history = engine.train(train_loader, val_loader, optimizer, criterion, num_epochs=1)\n"
        "assert engine.state.ema.decay == 0.9999\n"
        "print('final', rank, history['val_loss'], flush=True)\n",
        "# Cleanup" + cleanup,
        "assert not torch.distributed.is_initialized()\n",
    ]
    script.write_text("".join(parts))
    port = str(free_port())
    processes = [start(script, str(rank), MASTER_PORT=port) for rank in range(2)]
    outputs = [finish(process) for process in processes]
    finals = [re.findall(r"^final (\d) (.*)$", output, re.MULTILINE) for output in outputs]
    assert [finals[0][0][0], finals[1][0][0]] == ["0", "1"]
    assert finals[0][0][1] == finals[1][0][1]  # every rank has the same metrics
    for output in outputs:
        firsts = first_samples(output.split("trained")[0])
        epochs = [firsts[start : start + 8] for start in (0, 8, 16)]
        assert len(firsts) == 24
        assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert "Epoch 3" in outputs[0]
    assert "Epoch" not in outputs[1]  # only rank 0 prints
    folder = tmp_path / "checkpoints" / "experiment"
    assert {"best.pt", "last.pt", "metrics.jsonl"} <= {file.name for file in folder.iterdir()}


def test_method_2_runs_as_printed_lambdas_included(tmp_path: Path) -> None:
    """The script has no `if __name__ == "__main__"`."""
    needs = "needs cloudpickle (pip install -r recipes/training_engine/requirements.txt)"
    pytest.importorskip("cloudpickle", reason=needs)
    block = guides_blocks()[METHOD_2]
    assert block.count("'num_epochs': 100") == 1
    script = tmp_path / "method_2.py"
    text = YOURS + block.replace("'num_epochs': 100", "'num_epochs': 6")
    script.write_text(text)
    output = finish(start(script, OMP_NUM_THREADS="1"))
    assert "Device: cuda:0, 2 process(es) with" in output
    assert len(set(first_samples(output))) >= 6  # of 12; in the same order in each epoch 2
    assert "Effective batch: 64 x 2 = 128" in output
    assert "Training complete after 6 epochs" in output
    folder = tmp_path / "checkpoints" / "my_experiment"
    assert {"best.pt", "last.pt", "training_history.png", "results.csv"} <= {
        file.name for file in folder.iterdir()
    }
    # The same from two launches, as of two machines, with one process each.
    folder.rename(tmp_path / "one")
    meeting = (
        "nnodes=2, node_rank=int(sys.argv[1]), master_addr='127.0.0.1', "
        f"master_port={free_port()}, **config"
    )
    script.write_text(text.replace("torch.cuda.device_count()", "1").replace("**config", meeting))
    alone = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    outputs = [finish(machine) for machine in [start(script, rank, **alone) for rank in "01"]]
    assert ["Device: cuda:0, 2 process(es) with" in output for output in outputs] == [True, False]
    one, two = (
        torch.load(place / "last.pt", weights_only=True) for place in (tmp_path / "one", folder)
    )
    assert_equal(two["model_state_dict"], one["model_state_dict"])
    assert two["history"]["val_loss"] == one["history"]["val_loss"]
