"""Launch files for Slurm, Kubernetes, SkyPilot and Docker, and a machine with exactly one GPU."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed.run import config_from_args, parse_args

from tests.commands.kubeflow import KUBEFLOW
from tests.support.oracle import draw_data
from tests.support.plugin import PRETENCE, PROJECT, run_script
from yolo_seg_ddp.training.config import TrainConfig
from yolo_seg_ddp.training.launch import read_launch
from yolo_seg_ddp.utils.config import parse_config

# --- What `launch/` holds, checked against those who will read it: torchrun, the trainer,
# Kubeflow's rules, bash

PATIENCE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
BATCH_SCRIPT = PROJECT / "launch" / "slurm.sbatch"
FAKE_SCONTROL = """#!/bin/sh
case "$1 $2" in
    "show hostnames") printf 'node7\\nnode8\\n' ;;
    "show config") echo "RequeueExit             = $REQUEUE_EXIT" ;;
    requeue*) echo "$@" >>"$CALLS"; exit "${REQUEUE_FAILS:-0}" ;;
esac
"""
FAKE_SRUN = """#!/bin/sh
echo "NNODES=$NNODES MASTER=$MASTER_ADDR:$MASTER_PORT" "$@" >>"$CALLS"
[ -z "$TOLD" ] || touch "$RUN_FOLDER.told"
exit "${SRUN_CODE:-0}"
"""


@pytest.fixture(scope="module")
def documents() -> dict[str, dict[str, Any]]:
    texts = yaml.safe_load_all((PROJECT / "launch" / "trainjob.yaml").read_text(encoding="utf-8"))
    return {document["kind"]: document for document in texts}


def pod_of(documents: dict[str, dict[str, Any]], step: int = 1) -> dict[str, Any]:
    """Return the pod of a step: 0 prepares the data, 1 trains."""
    job = documents["TrainingRuntime"]["spec"]["template"]["spec"]["replicatedJobs"][step]
    pod: dict[str, Any] = job["template"]["spec"]["template"]["spec"]
    return pod


# The fields of Kubeflow Trainer v2.2.0 to v2.3.0, from
# manifests/base/crds/trainer.kubeflow.org_*.yaml of github.com/kubeflow/trainer: its API server
# drops others without a word. `numProcPerNode` and `elasticPolicy` of `torch` ended with v2.2.
KUBEFLOW_FIELDS = {
    "TrainJob spec": "activeDeadlineSeconds initializer managedBy runtimePatches runtimeRef "
    "suspend trainer",
    "TrainJob spec trainer": "args command env image numNodes numProcPerNode resourcesPerNode",
    "TrainingRuntime spec": "mlPolicy podGroupPolicy template",
    "TrainingRuntime spec mlPolicy": "flux jax mpi numNodes torch xgboost",
    "TrainingRuntime spec mlPolicy torch": "",
    "TrainingRuntime spec template": "metadata spec",
    "TrainingRuntime spec template spec": "coordinator failurePolicy managedBy network "
    "replicatedJobs startupPolicy "
    "successPolicy suspend ttlSecondsAfterFinished volumeClaimPolicies",
}
# The container that Trainer looks for in the job of each kind:
# pkg/webhooks/trainingruntime_webhook.go.
CONTAINERS = {"dataset-initializer": "dataset-initializer", "trainer": "node"}


def test_the_manifest_has_only_fields_that_trainer_knows(
    documents: dict[str, dict[str, Any]],
) -> None:
    for place, names in KUBEFLOW_FIELDS.items():
        fields: Any = documents
        for name in place.split():
            fields = fields[name]
        assert set(fields) <= set(names.split()), place
    numbers = documents["TrainJob"]["spec"]["trainer"]
    assert isinstance(numbers["numNodes"], int)
    assert isinstance(numbers.get("numProcPerNode", 1), int), "v2.2 takes no word such as auto"


def test_the_pods_with_gpus_wait_for_the_prepared_data(
    documents: dict[str, dict[str, Any]],
) -> None:
    prepares, trains = documents["TrainingRuntime"]["spec"]["template"]["spec"]["replicatedJobs"]
    assert "dependsOn" not in prepares
    assert trains["dependsOn"] == [{"name": prepares["name"], "status": "Complete"}]
    for job in (prepares, trains):
        kind = job["template"]["metadata"]["labels"]["trainer.kubeflow.org/trainjob-ancestor-step"]
        (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
        assert container["name"] == CONTAINERS[kind]
        assert "nvidia.com/gpu" not in str(container)
    (preparer,), (trainer,) = (pod_of(documents, step)["containers"] for step in (0, 1))
    assert (
        preparer["image"] == trainer["image"] == documents["TrainJob"]["spec"]["trainer"]["image"]
    )
    assert preparer["command"] == ["python", "prepare_data.py"]
    require_same_data(preparer["args"], documents["TrainJob"]["spec"]["trainer"]["args"])


def test_the_job_names_its_runtime_and_the_trainer_s_pod(
    documents: dict[str, dict[str, Any]],
) -> None:
    runtime, job = documents["TrainingRuntime"], documents["TrainJob"]
    reference = {
        "apiGroup": "trainer.kubeflow.org",
        "kind": "TrainingRuntime",
        "name": runtime["metadata"]["name"],
    }
    assert job["spec"]["runtimeRef"] == reference
    assert {document["apiVersion"] for document in documents.values()} == {
        "trainer.kubeflow.org/v1alpha1"
    }
    replicated = runtime["spec"]["template"]["spec"]["replicatedJobs"][1]
    labels = replicated["template"]["metadata"]["labels"]
    # By this label and the container's name the controller finds where the variables belong.
    assert labels["trainer.kubeflow.org/trainjob-ancestor-step"] == "trainer"
    assert [
        replicated["name"],
        *(container["name"] for container in pod_of(documents)["containers"]),
    ] == ["node"] * 2
    assert "torch" in runtime["spec"]["mlPolicy"]
    # Batches find room, every mount has its volume, and both steps see the same data.
    for step in (0, 1):
        pod = pod_of(documents, step)
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        mounts = {
            mount["mountPath"]: mount["name"] for mount in pod["containers"][0]["volumeMounts"]
        }
        assert set(mounts.values()) == set(volumes)
        assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
        assert volumes[mounts["/data"]]["persistentVolumeClaim"] == {"claimName": "yolo-seg-data"}


def test_torchrun_takes_the_rest_from_kubeflow_s_variables(
    documents: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = documents["TrainJob"]["spec"]["trainer"]
    # Kubeflow refuses a job that sets these itself.
    assert not {variable["name"] for variable in trainer["env"]} & set(KUBEFLOW)
    for name, value in KUBEFLOW.items():
        monkeypatch.setenv(name, value)
    assert trainer["command"][0] == "torchrun"
    arguments = parse_args([*trainer["command"][1:], *trainer["args"]])
    config = config_from_args(arguments)[0]
    assert (config.min_nodes, config.max_nodes, config.nproc_per_node) == (2, 2, 3)
    assert (config.rdzv_backend, config.rdzv_endpoint) == ("static", "job-node-0-0.job:29400")
    assert config.rdzv_configs["rank"] == 1
    assert "SIGUSR1" in arguments.signals_to_handle.split(",")
    patience_s = int({variable["name"]: variable["value"] for variable in trainer["env"]}[PATIENCE])
    monkeypatch.setenv(PATIENCE, str(patience_s))
    # Older versions of torchrun always wait 30 s.
    assert getattr(config_from_args(arguments)[0], "shutdown_timeout", patience_s) == patience_s
    assert patience_s < pod_of(documents)["terminationGracePeriodSeconds"]
    assert arguments.training_script == "train_yolo_ddp.py"
    options = parse_config(TrainConfig, "", arguments.training_script_args)
    mounts = [mount["mountPath"] for mount in pod_of(documents)["containers"][0]["volumeMounts"]]
    for place in (options.data, options.save_dir):
        assert any(str(place).startswith(f"{mount}/") for mount in mounts)


def require_same_data(preparing: list[str], training: list[str]) -> None:
    """Fail unless the preparation packs what the training will read."""
    prepared, trained = (
        parse_config(TrainConfig, "", preparing),
        parse_config(TrainConfig, "", training),
    )
    for name in ("data", "img_size", "windows", "cache_dir", "skip_bad"):
        assert getattr(prepared, name) == getattr(trained, name)


# --- SkyPilot: two steps, as bash would run them on a machine -------------------------------------

# The fields of SkyPilot 0.14.1 that the file may have, from sky/utils/schemas.py: get_task_schema,
# get_resources_schema.
SKYPILOT_FIELDS = {"name", "num_nodes", "resources", "volumes", "run", "setup"}
SKYPILOT_RESOURCES = {"image_id", "accelerators", "cpus", "memory", "use_spot", "job_recovery"}


@pytest.fixture
def steps(tmp_path: Path) -> list[dict[str, Any]]:
    """Return SkyPilot's steps, whose commands find the project, Python and a data set on this
    machine.
    """
    draw_data(tmp_path / "data", 2)
    text = (PROJECT / "launch" / "skypilot.yaml").read_text(encoding="utf-8")
    assert text.count("/usr/local/bin/python") == 2
    text = text.replace("/workspace", str(PROJECT)).replace("/usr/local/bin/python", sys.executable)
    header, *steps = yaml.safe_load_all(text.replace("/shared/data", str(tmp_path / "data")))
    assert set(header) == {"name"}
    return steps


def run_step(step: dict[str, Any], python: str = sys.executable, **variables: str) -> str:
    words = ["bash", "-e", "-c", step["run"].replace(f"\n{sys.executable} ", f"\n{python} ")]
    done = subprocess.run(
        words,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_skypilot_prepares_without_a_gpu_and_trains_on_all_machines(
    steps: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare, train = steps
    for step in steps:
        assert set(step) <= SKYPILOT_FIELDS
        assert set(step["resources"]) <= SKYPILOT_RESOURCES
        assert step["volumes"] == {"/shared": "yolo-seg"}
    assert "accelerators" not in prepare["resources"]
    assert prepare["resources"]["image_id"] == train["resources"]["image_id"]
    script, *preparing = shlex.split(run_step(prepare, python="echo"))
    assert script == "prepare_data.py"
    job = {
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NODE_RANK": "1",
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
    }
    pretended = {
        "PRETEND_GPUS": "8",
        "PYTHONPATH": str(PRETENCE),
        "SKYPILOT_NUM_GPUS_PER_NODE": "8",
    }
    starting, command = run_step(train, DRY_RUN="1", **job, **pretended).splitlines()
    assert starting.startswith("Starting 8 process(es) on cuda")
    words = shlex.split(command)
    arguments = parse_args(words[words.index("yolo_seg_ddp.utils.distributed.loopback") + 1 :])
    config = config_from_args(arguments)[0]
    assert (config.min_nodes, config.max_nodes, config.nproc_per_node) == (2, 2, 8)
    assert (config.rdzv_backend, config.rdzv_endpoint) == ("c10d", "10.0.0.1:29500")
    assert config.rdzv_configs["is_host"] == "false"
    require_same_data(preparing, arguments.training_script_args)
    assert str(parse_config(TrainConfig, "", arguments.training_script_args).save_dir).startswith(
        "/shared/"
    )


# --- The image ------------------------------------------------------------------------------------


def test_the_image_has_what_test_ddp_asks_for_and_nothing_that_git_ignores() -> None:
    text = (PROJECT / "Dockerfile").read_text(encoding="utf-8")
    checks = (PROJECT / "yolo_seg_ddp/measure/machine_checks.py").read_text(encoding="utf-8")
    (libraries,) = re.findall(r"apt-get install ([\w. -]+),", checks)
    assert f"--no-install-recommends {libraries} " in text
    assert "requirements.lock" in text.partition("COPY . ")[0]
    ignored = (PROJECT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    for line in (PROJECT / ".gitignore").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            name = line.strip("/")
            # Docker's patterns begin at the root, Git's without a slash at the front do not.
            assert {name, f"**/{name}"} & set(ignored), line


@pytest.fixture
def cluster(tmp_path: Path) -> dict[str, str]:
    """Return the environment of a batch shell whose `srun` and `scontrol` only note what they are
    asked.
    """
    for name, text in {
        "srun": FAKE_SRUN,
        "scontrol": FAKE_SCONTROL,
        "sleep": "#!/bin/sh\n",
    }.items():
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(text)
        program.chmod(0o755)
    (tmp_path / "run").mkdir()
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SLURM", "MASTER_"))
    }
    ours = {
        "CALLS": str(tmp_path / "calls"),
        "RUN_FOLDER": str(tmp_path / "run"),
        "REQUEUE_EXIT": "(null)",
        "TOLD": "",
    }
    job = {"SLURM_SUBMIT_DIR": "/shared/project", "SLURM_JOB_ID": "71234"}
    job |= {"SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "node[7-8]"}
    return {**inherited, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", **ours, **job}


def run_batch_script(
    cluster: dict[str, str], *arguments: str, **extra: str
) -> tuple[int, list[str], str]:
    """Return the script's exit code, what it called, and what it said."""
    calls = Path(cluster["CALLS"])
    calls.unlink(missing_ok=True)
    command = ["bash", str(BATCH_SCRIPT), *arguments]
    done = subprocess.run(
        command, env={**cluster, **extra}, capture_output=True, text=True, timeout=30, check=False
    )
    return done.returncode, calls.read_text().splitlines(), done.stdout + done.stderr


def requeues(calls: list[str]) -> list[str]:
    return [call for call in calls if call.startswith("requeue ")]


def test_several_machines_meet_at_the_job_s_own_port(cluster: dict[str, str]) -> None:
    code, lines, _ = run_batch_script(
        cluster, "--epochs", "3", SLURM_JOB_NUM_NODES="2", PROCESSES="4"
    )
    assert code == 0
    call = " ".join(lines)  # the shells' program is in it
    assert call.startswith("NNODES=2:2 MASTER=node7:21234 ")
    assert "/shared/project/train_ddp.sh 4 --max-restarts 3 --rdzv-id slurm-71234-0" in call
    assert call.endswith(f"-- --epochs 3 --save-dir {cluster['RUN_FOLDER']}")
    # one machine meets on its loopback
    assert run_batch_script(cluster)[1][0].startswith("NNODES= MASTER=: ")


def test_a_stopped_run_returns_to_the_queue_and_others_end(cluster: dict[str, str]) -> None:
    stopped = {"TOLD": "1", "SRUN_CODE": "1"}
    code, calls, _ = run_batch_script(cluster, **stopped)
    assert (code, requeues(calls)) == (75, ["requeue 71234"])
    for setting in ("75", "70,75", "75,130-140", "1-3,75"):
        code, calls, _ = run_batch_script(cluster, **stopped, REQUEUE_EXIT=setting)
        assert (code, requeues(calls)) == (75, [])  # Slurm does it
    assert requeues(run_batch_script(cluster, **stopped, REQUEUE_EXIT="175")[1]) == [
        "requeue 71234"
    ]
    code, calls, words = run_batch_script(
        cluster, **stopped, SLURM_RESTART_COUNT="7", MAX_REQUEUES="7"
    )
    assert (code, requeues(calls)) == (1, [])
    assert "MAX_REQUEUES" in words
    code, calls, _ = run_batch_script(cluster, SRUN_CODE="1")
    assert (code, requeues(calls)) == (1, [])
    code, calls, _ = run_batch_script(cluster, TOLD="1")  # told so late that it was done
    assert (code, requeues(calls)) == (0, [])
    # The word of an earlier start does not count: else a start that fails at once would return for
    # ever.
    Path(cluster["RUN_FOLDER"] + ".told").touch()
    code, calls, _ = run_batch_script(cluster, SRUN_CODE="2")
    assert (code, requeues(calls)) == (2, [])


def test_the_warning_leaves_time_for_the_launcher_s_own_patience() -> None:
    text = BATCH_SCRIPT.read_text(encoding="utf-8")
    directives = [
        line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")
    ]
    for wanted in ("--requeue", "--open-mode=append", "--ntasks-per-node=1", "--signal=TERM@90"):
        assert wanted in directives
    assert f"export {PATIENCE}=${{{PATIENCE}:-75}}\n" in text


def commands_of_the_guide(beginning: str) -> list[list[str]]:
    """Return the commands of docs/gpu.md that begin like this, in words."""
    text = (PROJECT / "docs" / "gpu.md").read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line.strip().removesuffix("&& break") for line in text.splitlines()]
    return [shlex.split(line, comments=True) for line in lines if line.startswith(beginning)]


def test_the_guide_s_commands_are_understood() -> None:
    (words,) = commands_of_the_guide("torchrun --")
    arguments = parse_args(words[1:])
    config = config_from_args(arguments)[0]
    assert (config.min_nodes, config.rdzv_backend, config.rdzv_endpoint) == (
        2,
        "c10d",
        "10.0.0.1:29500",
    )
    parse_config(TrainConfig, "", arguments.training_script_args)
    commands = commands_of_the_guide("NNODES=")
    assert len(commands) == 3
    for words in commands:
        variables = dict(word.split("=") for word in words if "=" in word)
        script, *rest = [word for word in words if "=" not in word][1:]
        assert script == "train_ddp.sh"
        parse_config(TrainConfig, "", read_launch(rest, variables).trainer_arguments)


def test_the_guide_s_preparation_under_slurm_comes_before_the_gpus(cluster: dict[str, str]) -> None:
    text = (PROJECT / "docs" / "gpu.md").read_text(encoding="utf-8")
    (block,) = [part for part in text.split("```") if "prepare=$(sbatch" in part]
    sbatch = Path(cluster["CALLS"]).parent / "bin" / "sbatch"
    sbatch.write_text('#!/bin/sh\nprintf "%s\\n" "$*" >>"$CALLS"\necho 71234\n')
    sbatch.chmod(0o755)
    done = subprocess.run(
        ["bash", "-ec", block.removeprefix("bash\n")], env=cluster, timeout=30, check=False
    )
    assert done.returncode == 0
    first, second = Path(cluster["CALLS"]).read_text().splitlines()
    assert "--parsable" in first
    assert "--gpus" not in first
    assert {"--dependency=afterok:71234", "--kill-on-invalid-dep=yes"} <= set(second.split())
    preparing = first.partition("prepare_data.py ")[2].split()
    require_same_data(preparing, second.partition("launch/slurm.sbatch ")[2].split())


def test_the_guide_s_network_policy_lets_only_the_job_s_pods_in() -> None:
    text = (PROJECT / "docs" / "gpu.md").read_text(encoding="utf-8")
    policy = yaml.safe_load(text.partition("```yaml")[2].partition("```")[0])
    pods = {"matchLabels": {"jobset.sigs.k8s.io/jobset-name": "yolo-seg"}}
    assert policy["spec"]["podSelector"] == pods
    assert policy["spec"]["ingress"] == [{"from": [{"podSelector": pods}]}]


# --- On a machine with exactly one GPU the demo starts one process --------------------------------


def test_the_demo_starts_one_process_for_one_gpu(tmp_path: Path) -> None:
    project = tmp_path / "project"
    for data in ("processed", "large"):
        draw_data(project / "data/demo" / data, 2)
    for name in ("demo.sh", "train_ddp.sh", "train_yolo_ddp.py"):
        shutil.copy(PROJECT / name, project)
    (project / "yolo_seg_ddp").symlink_to(PROJECT / "yolo_seg_ddp")
    python = project / "python"  # skips the demo's other scripts
    python.write_text(
        f'#!/bin/sh\ncase "$*" in "-m yolo_seg_ddp "*) echo "$2";; -*) exec "{sys.executable}" '
        '"$@";; *) echo "$1";; esac\n'
    )
    python.chmod(0o755)
    settings: Any = {"PYTHON": str(python), "PYTHONPATH": str(PRETENCE), "DRY_RUN": "1"}
    for gpus, expected in (
        ("1", "Starting 1 process(es) on cuda"),
        ("", "Starting 2 process(es) on cpu"),
    ):
        done = run_script("bash", project / "demo.sh", PRETEND_GPUS=gpus, **settings)
        assert done.stdout.count(expected) == 2, done.stdout + done.stderr  # the demo trains twice
        assert done.returncode == 0
