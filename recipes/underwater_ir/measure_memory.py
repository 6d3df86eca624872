"""Run underwater_ir.commands.measure_memory; `--help` lists its options."""

from underwater_ir.commands.measure_memory import main

from utils.common.errors import run_script

if __name__ == "__main__":
    run_script(main)
