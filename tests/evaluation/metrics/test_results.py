"""Results of images: checked, packed, sent between ranks, and merged."""

from __future__ import annotations

import numpy as np
import pytest

from tests.evaluation.made_up import image_result, one_image, random_results
from utils.evaluation.metrics import merge_results, pack_results, unpack_results


def test_image_result_refuses_arrays_that_do_not_belong_together() -> None:
    with pytest.raises(ValueError, match="image 7: scores"):
        image_result(7, [0.5, 0.4], [0], np.ones((1, 10)), np.ones((1, 10)), [], [])
    with pytest.raises(ValueError, match="image 7: box_hits has the shape"):
        image_result(7, [0.5], [0], np.ones((1, 9)), np.ones((1, 10)), [], [])


def test_image_result_refuses_sizes_of_some_only() -> None:
    with pytest.raises(ValueError, match="image 3: sizes are given for some"):
        image_result(3, [0.5], [0], np.ones((1, 10)), np.ones((1, 10)), [0], [], target_sizes=[1])


def test_packing_brings_everything_back() -> None:
    results = [*random_results(1), image_result(99, [], [], [], [], [], [])]
    packed = pack_results(results)
    assert all(array.dtype != object and array.dtype != bool for array in packed.values())
    back = unpack_results(packed)
    assert [result.image_id for result in back] == [result.image_id for result in results]
    for before, after in zip(results, back, strict=True):
        for name in ("scores", "class_ids", "box_hits", "mask_hits", "target_class_ids", "box_confusion"):
            assert getattr(before, name).dtype == getattr(after, name).dtype
            np.testing.assert_array_equal(getattr(before, name), getattr(after, name))
    assert unpack_results(pack_results([])) == []


def test_incomplete_transfer_is_noticed() -> None:
    packed = pack_results(random_results(2))
    packed["scores"] = packed["scores"][:-1]
    with pytest.raises(ValueError, match="scores has"):
        unpack_results(packed)


def test_merging_keeps_each_image_once_and_refuses_contradictions() -> None:
    results = random_results(3)
    merged = merge_results([results[6:], unpack_results(pack_results(results[:8]))])
    assert [result.image_id for result in merged] == list(range(12))
    other = one_image([0.5], [True], image_id=4)
    with pytest.raises(ValueError, match="image 4 was evaluated twice"):
        merge_results([results, [other]])
