"""All attacks on this project's trainings, in the order in which they run."""

from __future__ import annotations

from chaos import bad_data, full_disk, hangs, kills, owners, saves, sizes, soak, stops
from chaos.scenario import Scenario

SCENARIOS = (
    Scenario(
        "R1",
        "SIGKILL of a random rank of YOLOv8n-seg, again and again in one job",
        "exit 0, one restart for each kill, result bitwise equal",
        kills.random_kills,
    ),
    Scenario(
        "R2",
        "SIGKILL of a rank under plain torchrun, c10d and static rendezvous",
        "training again at the first restart, bitwise equal",
        kills.default_rendezvous,
    ),
    Scenario(
        "R3",
        "SIGTERM while YOLOv8n-seg accumulates, validates, begins an epoch",
        "stopped with a checkpoint each time; result bitwise equal",
        stops.at_any_moment,
    ),
    Scenario("R4", "the same, resumed with 0, 2, 1 loader processes", "bitwise equal", stops.other_workers),
    Scenario(
        "R5",
        "2 ranks, then 1, then 2, one global batch",
        "each sample once an epoch, as many steps, loss within 2 %",
        sizes.other_world_size,
    ),
    Scenario(
        "R6",
        "SIGKILL while a checkpoint is saved",
        "the old or the new one loads, the next save removes leftovers",
        saves.kills_while_saving,
    ),
    Scenario(
        "R7",
        "a disk that becomes full while YOLOv8n-seg trains, and is enlarged",
        "continues, then stops with the reason; the last checkpoint loads; resumed: bitwise equal",
        full_disk.filled_and_emptied,
    ),
    Scenario(
        "R8",
        "random bytes of a checkpoint flipped, or its end cut off",
        "detected, and the one before is loaded",
        saves.damage,
    ),
    Scenario(
        "R9",
        f"SIGSTOP of a rank, NCCL_TIMEOUT={hangs.GROUP_TIMEOUT_S}",
        f"detected within {hangs.MAX_DETECTION_S} s, bitwise equal",
        hangs.standing_still,
    ),
    Scenario(
        "R10",
        f"a peer dies inside the group's start, INIT_TIMEOUT={hangs.START_TIMEOUT_S}",
        "exit 76 within the timeout, or 1 at once",
        hangs.death_at_the_start,
    ),
    Scenario(
        "R11",
        "SIGTERM to the launcher, and again 10 ms later",
        "stopped with a checkpoint within 5 s, bitwise equal",
        stops.second_signal,
    ),
    Scenario(
        "R12",
        "Ctrl-C once; three times",
        "once: stopped with a checkpoint; three times: ended; both bitwise equal when resumed",
        stops.ctrl_c,
    ),
    Scenario("R13", "SIGKILL of the launcher", "no process left after 2 s", kills.killed_launcher),
    Scenario("R19", "NaN in one rank's loss", "skipped on all ranks, or rolled back; exit 0", bad_data.bad_losses),
    Scenario(
        "R20",
        "photographs that are cut off, empty or random bytes",
        "each is named; two trainings without them are equal",
        bad_data.bad_photographs,
    ),
    Scenario("R21", "data sets whose size the batch does not divide", "no hang, each sample once", sizes.odd_lengths),
    Scenario(
        "R22",
        "validation that takes three times the group's timeout, on all ranks",
        "no timeout",
        hangs.long_validation,
    ),
    Scenario(
        "R23",
        "two runs in one folder at once",
        "one trains, the other exits 73 and names it; no cleanup needed",
        owners.two_in_one_folder,
    ),
    Scenario(
        "R26",
        "SIGKILL of a rank in mid-epoch of a training on windows (`--windows 3`)",
        "resumed within the epoch, result bitwise equal",
        kills.kills_on_windows,
    ),
    Scenario("R25", "a long training", "memory, files, threads, shared memory grow by at most 5 %", soak.soak),
)
