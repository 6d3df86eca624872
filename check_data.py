"""Look for mistakes in a data set's photographs and labels; write check.html and check.json.

python check_data.py --data data/processed/dataset.yaml
python check_data.py --data dataset.yaml --model run/best.pt
python check_data.py --data dataset.yaml --tolerate   # errors are no failure
"""

from yolo_seg_ddp.utils.errors import run_script
from yolo_seg_ddp.utils.extras import require_extra


def main() -> int:
    """Run yolo_seg_ddp/extras/check; return the exit code.

    Raises UserError if that folder is not there.
    """
    return int(require_extra("check").main(__doc__))


if __name__ == "__main__":
    run_script(main)
