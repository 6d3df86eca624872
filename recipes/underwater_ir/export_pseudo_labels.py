"""Run underwater_ir.commands.export_pseudo_labels; `--help` lists its options."""

from underwater_ir.commands.export_pseudo_labels import main

from yolo_seg_ddp.utils.errors import run_script

if __name__ == "__main__":
    run_script(main)
