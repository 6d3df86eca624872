"""All attacks on this project's trainers, in the order in which they run."""

from __future__ import annotations

from chaos import bad_data, full_disk, hangs, kills, owners, saves, sizes, soak, stops
from chaos.scenario import Scenario

SCENARIOS = (
    Scenario(
        "R1",
        "SIGKILL of a random rank of YOLOv8n-seg, again and again in one job",
        "exit 0, one restart for each kill, bitwise",
        kills.random_kills,
    ),
    Scenario(
        "R2",
        "SIGKILL of a rank under plain torchrun, c10d and static rendezvous",
        "back at the first restart, bitwise",
        kills.default_rendezvous,
    ),
    Scenario(
        "R3",
        "SIGTERM while YOLOv8n-seg accumulates, validates, begins an epoch",
        "stopped with a checkpoint each time; the end bitwise",
        stops.at_any_moment,
    ),
    Scenario("R4", "the same, resumed with 0, 2, 1 loader processes", "bitwise", stops.other_workers),
    Scenario(
        "R5",
        "2 ranks, then 1, then 2, one global batch",
        "each sample once an epoch, as many steps, loss within 2 %",
        sizes.other_world_size,
    ),
    Scenario(
        "R6",
        "SIGKILL while a checkpoint is saved",
        "the old or the new one loads, the next save clears up",
        saves.kills_while_saving,
    ),
    Scenario(
        "R7",
        "a disk that fills while YOLOv8n-seg is trained, and is emptied",
        "goes on, stops with the reason, the last checkpoint loads; then bitwise",
        full_disk.filled_and_emptied,
    ),
    Scenario(
        "R8",
        "random bytes of a checkpoint flipped, or its end cut off",
        "seen, and the one before is loaded",
        saves.damage,
    ),
    Scenario(
        "R9",
        f"SIGSTOP of a rank, NCCL_TIMEOUT={hangs.GROUP_TIMEOUT_S}",
        f"seen within {hangs.MOST_DETECTION_S} s, bitwise",
        hangs.standing_still,
    ),
    Scenario(
        "R10",
        f"a peer dies inside the group's start, INIT_TIMEOUT={hangs.START_TIMEOUT_S}",
        "exit 76 in time, or 1 at once",
        hangs.death_at_the_start,
    ),
    Scenario(
        "R11",
        "SIGTERM to the launcher, and again 10 ms later",
        "stopped with a checkpoint within 5 s, bitwise",
        stops.second_signal,
    ),
    Scenario("R12", "Ctrl-C once; three times", "stopped with a checkpoint; out; both bitwise", stops.ctrl_c),
    Scenario("R13", "SIGKILL of the launcher", "no process left after 2 s", kills.killed_launcher),
    Scenario("R19", "a NaN in one rank's loss", "left out on all ranks, or undone; exit 0", bad_data.bad_losses),
    Scenario(
        "R20",
        "photographs cut off, empty or nonsense",
        "each is named; two trainings without them are equal",
        bad_data.bad_photographs,
    ),
    Scenario("R21", "data sets that no batch divides", "no hang, each sample once", sizes.odd_lengths),
    Scenario("R22", "validation of three times the group's timeout, on all ranks", "no timeout", hangs.long_validation),
    Scenario(
        "R23",
        "two runs in one folder at once",
        "one wins, the other exits 73 and names it; nothing to clear up",
        owners.two_in_one_folder,
    ),
    Scenario("R25", "a long training", "memory, files, threads, shared memory grow by at most 5 %", soak.soak),
)
