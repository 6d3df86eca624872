"""Translates the rank variables of Slurm's `srun` and Open MPI's `mpirun` to torchrun's names."""

from __future__ import annotations

import re
from collections.abc import Mapping

from utils.common.errors import UserError
from utils.distributed.rendezvous import LOOPBACK

DEFAULT_PORT = 29500  # torchrun's
FIRST_PORT, NUM_PORTS = 20000, 10000  # below the ports that systems use for outgoing connections


def variables_from_launcher(environment: Mapping[str, str]) -> dict[str, str]:
    """Return RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT; {} for a single process.

    Reads the variables of the `srun` step: a shell of `salloc` or `sbatch` has SLURM_NTASKS of the whole allocation
    even for a single process. Raises UserError on several machines when MASTER_ADDR is not set.
    """
    if _number(environment, "SLURM_STEP_NUM_TASKS") > 1:
        found = _from_slurm(environment)
    elif _number(environment, "OMPI_COMM_WORLD_SIZE") > 1:
        found = _from_open_mpi(environment)
    else:
        return {}
    if found["LOCAL_WORLD_SIZE"] == found["WORLD_SIZE"]:
        found["MASTER_ADDR"] = LOOPBACK
    elif "MASTER_ADDR" not in environment:
        raise UserError(
            f"{found['WORLD_SIZE']} tasks on several machines but MASTER_ADDR is not set; before the launch: "
            'export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1), or the first machine\'s name'
        )
    return {**found, **{name: environment[name] for name in ("MASTER_ADDR", "MASTER_PORT") if name in environment}}


def _from_slurm(environment: Mapping[str, str]) -> dict[str, str]:
    per_node = tasks_of_nodes(environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
    node = _number(environment, "SLURM_NODEID")
    if not node < len(per_node):
        raise UserError(
            f"SLURM_STEP_TASKS_PER_NODE={environment.get('SLURM_STEP_TASKS_PER_NODE')} does not list node "
            f"SLURM_NODEID={environment.get('SLURM_NODEID')}; launch with srun, or with torchrun"
        )
    # A port for each step of each job; with NUM_PORTS of them, two jobs on a node hardly ever share one.
    port = FIRST_PORT + (_number(environment, "SLURM_JOB_ID") + 101 * _number(environment, "SLURM_STEP_ID")) % NUM_PORTS
    return {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": environment["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": environment["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": str(per_node[node]),
        "MASTER_PORT": str(port),
    }


def _from_open_mpi(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        "RANK": environment["OMPI_COMM_WORLD_RANK"],
        "WORLD_SIZE": environment["OMPI_COMM_WORLD_SIZE"],
        "LOCAL_RANK": environment["OMPI_COMM_WORLD_LOCAL_RANK"],
        "LOCAL_WORLD_SIZE": environment["OMPI_COMM_WORLD_LOCAL_SIZE"],
        "MASTER_PORT": str(DEFAULT_PORT),
    }


def tasks_of_nodes(text: str) -> list[int]:
    """Parse Slurm's list of tasks on each node: `2(x3),1` is [2, 2, 2, 1]. Returns [] for anything else."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            return []
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    return int(text) if text.isdigit() else 0
