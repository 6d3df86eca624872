"""Three attacks on Ultralytics' trainer: does a resumed run equal an undisturbed one, and is damage detected?"""

from __future__ import annotations

import random
import signal
import sys
import time
from pathlib import Path

import torch

from chaos.jobs import Job, require, run
from chaos.scenario import Result, Scenario, Setting, spread
from chaos.trainers import draw_sample


def _command(how: str, data: Path, folder: Path) -> list[str]:
    return [sys.executable, "-m", "chaos.their_run", how, str(data), str(folder)]


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a run's last.pt. Raises whatever Ultralytics' loader raises."""
    from ultralytics import YOLO

    model = YOLO(folder / "run" / "weights" / "last.pt").model
    assert isinstance(model, torch.nn.Module)
    return model.state_dict()


def _num_equal(first: Path, second: Path) -> tuple[int, int]:
    one, two = _weights(first), _weights(second)
    return sum(torch.equal(value, two[name]) for name, value in one.items()), len(one)


def resumed(setting: Setting) -> Result:
    """Kill a run after epoch 2 of 4, resume it and compare with an undisturbed run; two undisturbed ones are the control."""
    result = Result()
    data = draw_sample(setting.folder, 16)
    whole = setting.folder / "whole"
    require(_command("whole", data, whole), whole / "log")
    control = setting.folder / "control"
    require(_command("whole", data, control), control / "log")
    equal, total = _num_equal(control, whole)
    result.trial("control, nobody killed", "" if equal == total else f"{equal} of {total} tensors equal")
    folder = setting.folder / "killed"
    code = run(_command("killed", data, folder), folder / "log")
    assert code == -signal.SIGKILL
    require(_command("resumed", data, folder), folder / "log-resumed")
    equal, total = _num_equal(folder, whole)
    result.trial("killed and resumed", "" if equal == total else f"{equal} of {total} tensors equal")
    result.figures = {"tensors equal after a resume": f"{equal} of {total}"}
    return result


def kills_while_saving(setting: Setting) -> Result:
    """Kill a trainer at a random moment of a save, then open the checkpoint."""
    result, rng, durations = Result(), random.Random(setting.seed), []
    data = draw_sample(setting.folder, 16)
    folder = setting.folder / "saves"
    for number in range(setting.count(50, 3)):
        with Job(_command("saves", data, folder), folder / f"log-{number}") as job:
            job.wait_until(lambda: "saving 2\n" in job.output(), "a save", 300)
            start_s = time.monotonic()
            job.wait_until(lambda: "saving 3\n" in job.output(), "a save", 300)
            durations.append(time.monotonic() - start_s)
            time.sleep(rng.uniform(0, 1.2 * durations[-1]))
            job.process.send(signal.SIGKILL)
            job.popen.wait(30)
        result.trial("kill", _problem(folder))
    result.figures = {"one save": spread([seconds * 1000 for seconds in durations], "ms")}
    return result


def damage(setting: Setting) -> Result:
    """Change a random byte of last.pt or cut its end off: does opening the file raise an error?"""
    result, rng = Result(), random.Random(setting.seed)
    data = draw_sample(setting.folder, 16)
    folder = setting.folder / "whole"
    require(_command("whole", data, folder), folder / "log")
    file = folder / "run" / "weights" / "last.pt"
    whole = file.read_bytes()
    for number in range(setting.count(100, 10)):
        content = bytearray(whole)
        position = rng.randrange(len(content))
        if number % 4 == 3:
            content, how = content[:position], "cut"
        else:
            content[position] ^= rng.randrange(1, 256)
            how = "flip"
        file.write_bytes(content)
        result.trial(how, "" if _problem(folder) else f"at {position} not detected")
    result.figures = {"size": f"{len(whole) / 1e6:.1f} MB"}
    return result


def _problem(folder: Path) -> str:
    try:
        _weights(folder)
    except Exception as error:  # noqa: BLE001 # damage can cause any error
        return f"{type(error).__name__} {' '.join(str(error).split())[:100]}"
    return ""


SCENARIOS = (
    Scenario("U1", "killed after epoch 2 of 4, resume=True", "bitwise equal to an undisturbed run", resumed),
    Scenario("U6", "SIGKILL while a checkpoint is saved", "last.pt opens", kills_while_saving),
    Scenario("U8", "random bytes of last.pt flipped, or its end cut off", "detected", damage),
)
