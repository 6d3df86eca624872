"""Run underwater_ir.commands.restore; `--help` lists its options."""

from underwater_ir.commands.restore import main

from utils.common.errors import run_script

if __name__ == "__main__":
    run_script(main)
