"""Attacks on real trainings, and what is left of them: `python -m chaos`, `make chaos`, docs/reliability.md."""
