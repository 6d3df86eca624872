"""Run underwater_ir.commands.make_data; `--help` lists its options."""

from underwater_ir.commands.make_data import main

from utils.common.errors import run_script

if __name__ == "__main__":
    run_script(main)
