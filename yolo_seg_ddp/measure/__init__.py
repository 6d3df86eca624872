"""What a training costs: profile, scaling over ranks, checks of the machine.

In: a model and made-up batches. Out: tables, charts and JSON. Read `profiling.py` first.
"""
