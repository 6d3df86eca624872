"""Evaluate a trained model on a split of a data set; write report.html, metrics.json and COCO files.

python evaluate_model.py --model models/epri_distribution_ddp/best.pt
python evaluate_model.py --model run/best.pt --mask-resolution native
python evaluate_model.py --model run/best.pt --compare models/earlier/best.pt
python evaluate_model.py --model run/best.onnx   # an export (extras/exports/README.md)
torchrun --nproc_per_node=4 evaluate_model.py --model run/best.pt
"""

import os

from utils.commands.evaluation import EvaluationConfig, result_lines, run
from utils.common.config import parse_config
from utils.common.errors import run_script
from utils.common.signals import die_with_parent
from utils.common.text import next_command
from utils.data.dataset_yaml import load_dataset_yaml
from utils.evaluation.tables import all_tables


def main() -> int:
    """Evaluate; return the exit code."""
    config = parse_config(EvaluationConfig, __doc__)
    die_with_parent()
    if metrics := run(config):
        print(all_tables(metrics))
        print("\n".join(result_lines(config, metrics[0])))
        spec = load_dataset_yaml(config.data, trust_links=config.trust_links)
        source = os.path.relpath(spec.splits[config.split][0])
        print(next_command("python", "inference.py", "--model", config.model, "--source", source))
    return 0


if __name__ == "__main__":
    run_script(main)
