"""evaluate_model.py writes report.html: two models, two ranks and tiles."""

from pathlib import Path

from tests.predict.tiny_network import smooth_data, tiny_weights
from tests.support.plugin import must_run, read_json, torchrun
from yolo_seg_ddp.extras.report.tests.made_up import Elements, check_figures


def test_two_ranks_write_a_page_of_two_models_with_the_small_pictures_of_both(
    tmp_path: Path,
) -> None:
    weights = [tiny_weights(tmp_path / f"{scale}.pt", prototype_scale=scale) for scale in (1, 2)]
    model = ("--model", weights[0], "--compare", weights[1], "--data", smooth_data(tmp_path))
    flags = (
        "--mask-resolution",
        "native",
        "--tiles",
        "64",
        "--overlap",
        "0.5",
        "--output",
        tmp_path / "out",
    )
    printed = must_run(*torchrun(2), "evaluate_model.py", *model, *flags)
    assert (
        f"Results in {tmp_path}/out: report.html, photographs.html, metrics.json, "
        "predictions.json, " in printed
    )
    assert f"; {tmp_path}/out/photographs.html shows them\n" in printed
    metrics = [
        read_json(tmp_path / "out" / f"{name}.json") for name in ("metrics", "compared_metrics")
    ]
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert check_figures(page, metrics) > 200
    assert (
        sum(tag == "img" for tag, _ in Elements(page).found)
        == 3 * len(metrics[0]["worst_images"])
        > 0
    )
    small = list((tmp_path / "out" / "photographs" / "small").iterdir())
    assert len(small) == metrics[0]["num_images"] > 1, "of both ranks"
