"""Run underwater_ir.commands.score_with_clip; `--help` lists its options."""

from underwater_ir.commands.score_with_clip import main

from yolo_seg_ddp.utils.errors import run_script

if __name__ == "__main__":
    run_script(main)
