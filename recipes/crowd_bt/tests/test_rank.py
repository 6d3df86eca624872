"""rank.py against choix, crowd-kit, formulas and simulated annotators; the reader of the votes of
real people.
"""

import json
from pathlib import Path

import cv2
import numpy as np
import pytest
from crowd_bt import crowdpareto, rank
from crowd_bt.comparisons import Comparison

from tests.support.recipes import assert_refused, run_command

pytest.importorskip(
    "scipy", reason="needs scipy (pip install -r recipes/crowd_bt/requirements.txt)"
)


def test_qualities_are_those_of_choix_and_crowd_kit() -> None:
    # The example of choix, winner first. Computed by choix 0.4.1, opt_pairwise(5, pairs,
    # alpha=1e-6), and crowd-kit 1.4.2, log of BradleyTerry(n_iter=100_000, tol=0): with another tol
    # it ends after two steps.
    pairs = [(1, 0), (0, 4), (3, 1), (0, 2), (2, 4), (4, 3)]
    votes = [Comparison(str(winner), str(loser), 1, "vote") for winner, loser in pairs]
    found, people, draw = rank.fit(votes, 1e-6, trusts_all=True)
    assert [found[str(item)][0] for item in range(5)] == pytest.approx(
        [0.58281, 0.19427, 0, -0.19427, -0.58281], abs=1e-3
    )
    assert (people, draw) == ({}, 0.0)
    # choix: alpha=0.01, its penalty is alpha |x|², without the half
    found = rank.fit(votes, 0.02, trusts_all=True)[0]
    assert [found[str(item)][0] for item in range(5)] == pytest.approx(
        [0.56623, 0.18367, 0, -0.18367, -0.56623], abs=1e-3
    )


def test_two_items_have_the_qualities_errors_and_draws_of_the_formulas() -> None:
    votes = [
        Comparison("a", "b", label, "vote", weight)
        for label, weight in ((1, 80.0), (-1, 20.0), (0, 20.0))
    ]
    items, _, draw = rank.fit(votes, 1e-6, trusts_all=True)
    half, error = np.log(80 / 20) / 2, np.sqrt(1 / 80 + 1 / 20) / 2  # of half the difference
    assert items["a"] == pytest.approx((half, error), rel=1e-3)
    assert items["b"] == pytest.approx((-half, error), rel=1e-3)
    nu = 20 / np.sqrt(80 * 20)
    assert draw == pytest.approx(nu / (2 + nu), rel=1e-3)


def test_annotators_have_the_reliabilities_and_errors_of_right_answers() -> None:
    # Nobody doubts that a is better: bob's and eve's answers are right or wrong, their η has the
    # posterior of a share.
    answers = {"ann": (10**6, 0), "bob": (30, 10), "eve": (5, 95)}
    votes = [
        Comparison("a", "b", label, "vote", float(number), name)
        for name, numbers in answers.items()
        for label, number in zip((1, -1), numbers, strict=True)
        if number
    ]
    items, people, _ = rank.fit(votes, 1e-6)
    assert items["a"][0] > 2
    for name in ("bob", "eve"):
        right, wrong = answers[name]
        eta, number = (10 + right) / (11 + right + wrong), 11 + right + wrong
        assert people[name] == pytest.approx((eta, np.sqrt(eta * (1 - eta) / number)), rel=0.02)


def test_a_csv_file_of_votes_is_ranked_and_a_wrong_line_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, output = tmp_path / "votes.csv", tmp_path / "ranking.json"
    lines = [
        "annotator,left,right,choice",
        *["ann,a,b,left", "bob,b,c,left", "ann,c,a,right"] * 3,
        "bob,a,b,draw",
    ]
    file.write_text("\n".join(lines))
    assert run_command(rank, "--votes", file, "--output", output) == 0
    found = json.loads(output.read_text())
    assert [row["item"] for row in found["ranking"]] == ["a", "b", "c"]
    assert found["annotators"].keys() == {"ann", "bob"}
    assert all(row["error"] > 0 for row in [*found["ranking"], *found["annotators"].values()])
    assert "annotator ann: eta 0.9" in capsys.readouterr().out
    for line, complaint in (
        ("ann,a,b,lft", "choice 'lft' is not left"),
        ("ann,a,a,left", "names of two items"),
    ):
        file.write_text("\n".join([*lines, line]))
        with assert_refused(f"{file}:12: ", complaint):
            run_command(rank, "--votes", file)
    file.write_text("left,right\na,b")
    with assert_refused(f"{file}:2: choice None is not left"):
        run_command(rank, "--votes", file)


def test_votes_of_real_people_are_read_and_equal_photographs_stay_together(tmp_path: Path) -> None:
    file = tmp_path / "votes.txt"
    # the second line's `0-1` is in the data: a comma is missing
    file.write_text("0;1;2;-1,0-1,1,1\n2;1;3;1,1,1,1,1\n")
    first, *others = crowdpareto.read_votes(file)
    assert (first.img1, first.img2, first.pair_type) == ("(1).jpg", "(2).jpg", "color")
    assert {row.label: row.weight for row in [first, *others[:2]]} == {-1: 2, 0: 1, 1: 2}
    assert (others[2].pair_type, others[2].label, others[2].weight) == ("landscape", 1, 5)
    # Two of three people prefer the first: one pair right. The pair without a majority counts for
    # no side.
    rows = [
        Comparison("a", "b", 1, "x", 2.0),
        Comparison("a", "b", -1, "x", 1.0),
        Comparison("a", "c", 0, "x", 3.0),
    ]
    assert crowdpareto.agreement(rows, {"a": 2.0, "b": 1.0, "c": 1.5}) == (1.0, pytest.approx(1.0))
    files = {f"{number}.png": bytes([number // 2]) for number in range(100)}
    unseen = crowdpareto.choose_unseen(files, 0)
    assert len(unseen) == crowdpareto.NUM_UNSEEN
    assert all(f"{int(name[:-4]) ^ 1}.png" in unseen for name in unseen)
    sharp = np.random.default_rng(0).integers(0, 255, (64, 64, 3)).astype(np.uint8)
    values = [
        crowdpareto.image_statistics(cv2.GaussianBlur(sharp, (0, 0), sigma)) for sigma in (3.0, 0.5)
    ]
    rows = [
        Comparison("sharp", "blurred", 1, "x", 4.0),
        Comparison("sharp", "blurred", -1, "x", 1.0),
    ]
    weights = crowdpareto.linear_model(rows, {"blurred": values[0], "sharp": values[1]})
    assert values[0][-1] < values[1][-1]
    assert values[0] @ weights < values[1] @ weights
