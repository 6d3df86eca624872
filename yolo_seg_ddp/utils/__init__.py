"""Options, errors, files and this machine: what every other room needs. It imports no other room.

In: command lines, files, the environment. Out: frozen option objects, one-line errors, atomic
files, the device. Read `config.py` first: how a script's dataclass becomes its options.
"""
