"""Slurm's daemons on this machine: a job that is told to stop leaves with code 75, returns, and ends with the same bits."""

from __future__ import annotations

import os

import pytest

from chaos import slurm


@pytest.mark.skipif(bool(slurm.reason_to_skip()), reason=f"{slurm.reason_to_skip()} (apt-get install slurm-wlm munge)")
def test_a_stopped_job_returns_from_the_queue_and_not_a_bit_differs() -> None:
    figures = slurm.stopped_while_running(slurm.reference_hash(), by="signal")
    assert figures["starts"] == 2


def test_without_root_or_slurm_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert slurm.reason_to_skip() == "needs root on Linux"
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(slurm.shutil, "which", lambda name, path: None if name == "slurmd" else name)
    assert slurm.reason_to_skip() == "needs slurmd"
    assert slurm.run(2)["skipped"] == "needs slurmd"
