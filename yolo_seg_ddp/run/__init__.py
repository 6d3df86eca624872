"""A run's folder: lock, state, checkpoints, log, and the monitor that reads them.

In: records of the engine. Out: `checkpoint/`, `metrics.jsonl`, `status.json`. Read `folder.py`
first.
"""
