"""Run underwater_ir.commands.restore; `--help` lists its options."""

from underwater_ir.commands.restore import main

from yolo_seg_ddp.utils.errors import run_script

if __name__ == "__main__":
    run_script(main)
