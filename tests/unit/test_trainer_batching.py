"""Cutting samples into batches loses nothing and depends on no order."""

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.batching import check_samples, micro_batches, split_minibatches
from trainer.sample import Sample


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    length = draw(st.integers(2, 40))
    ids = tuple(draw(st.lists(st.integers(0, 99), min_size=length, max_size=length)))
    mask = (0, *draw(st.lists(st.integers(0, 1), min_size=length - 1, max_size=length - 1)))
    values = tuple(float(place) for place in range(length))
    return Sample(ids, mask, values, values, values, draw(st.sampled_from(["", "code", "math"])))


def trained(rows: list[Sample]) -> Counter[tuple[str, int, float]]:
    return Counter(
        (row.tag, row.token_ids[place], row.advantages[place])
        for row in rows
        for place, flag in enumerate(row.loss_mask)
        if flag
    )


@given(st.lists(samples(), max_size=12), st.integers(64, 200))
def test_every_trained_token_is_in_one_micro_batch_behind_its_predictor(rows: list[Sample], limit: int) -> None:
    found: Counter[tuple[str, int, float]] = Counter()
    for batch in micro_batches(rows, limit):
        assert batch.token_ids_BT.numel() <= limit
        assert bool((batch.token_ids_BT.flatten()[batch.predictors_N + 1] == batch.targets_N).all())
        assert bool(batch.valid_BT.flatten()[batch.predictors_N].all())
        tokens = zip(batch.targets_N.tolist(), batch.advantages_N.tolist(), strict=True)
        found.update((batch.tag, target, advantage) for target, advantage in tokens)
    assert found == trained(rows)


@given(st.lists(samples(), max_size=12), st.integers(64, 200), st.randoms())
def test_micro_batches_do_not_depend_on_order(rows: list[Sample], limit: int, shuffle: random.Random) -> None:
    shuffled = shuffle.sample(rows, len(rows))
    pairs = zip(micro_batches(rows, limit), micro_batches(shuffled, limit), strict=True)
    assert all(a.tag == b.tag and a.token_ids_BT.equal(b.token_ids_BT) for a, b in pairs)


def test_a_sequence_longer_than_the_limit_stands_alone() -> None:
    long = Sample((1,) * 100, (0,) + (1,) * 99, *((0.0,) * 100,) * 3)
    short = Sample((1, 2), (0, 1), *((0.0,) * 2,) * 3)
    assert [tuple(batch.token_ids_BT.shape) for batch in micro_batches([long, short], 64)] == [(1, 2), (1, 100)]


@given(st.lists(samples(), max_size=20), st.integers(1, 5), st.integers(0, 9), st.randoms())
def test_minibatches_hold_equal_parts_of_every_tag(
    rows: list[Sample], count: int, seed: int, shuffle: random.Random
) -> None:
    parts = split_minibatches(rows, count, seed)
    assert Counter(row for part in parts for row in part) == Counter(rows)
    assert all(parts)
    for tag in {row.tag for row in rows}:
        held = [sum(row.tag == tag for row in part) for part in parts]
        assert max(held) - min(held) <= 1
    assert split_minibatches(shuffle.sample(rows, len(rows)), count, seed) == parts


GOOD = Sample((5, 6, 7), (0, 0, 1), (0.0, 0.0, -1.0), (0.0, 0.0, 1.0), (0.0, 0.0, 1.0), "math")


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (replace(GOOD, advantages=(0.0, 0.0, float("nan"))), r"advantages\[2\] = nan"),
        (replace(GOOD, weights=(0.0, 0.0, float("inf"))), r"weights\[2\] = inf"),
        (replace(GOOD, logprobs=(0.0, 0.0, float("-inf"))), r"logprobs\[2\] = -inf"),
        (replace(GOOD, loss_mask=(1, 0, 1)), "first token"),
        (replace(GOOD, weights=(1.0,)), "different lengths"),
        (replace(GOOD, token_ids=(5, 6, 100)), "outside 0 to 99"),
        (replace(GOOD, token_ids=(5, -1, 1)), "outside 0 to 99"),
        (Sample((), (), (), (), ()), "has 0 tokens"),
        (Sample((1,) * 51, (0,) * 51, *((0.0,) * 51,) * 3), "has 51 tokens"),
    ],
)
def test_a_sample_that_cannot_be_trained_on_is_named(bad: Sample, message: str) -> None:
    with pytest.raises(ValueError, match=f"Sample 1 .*{message}"):
        check_samples([GOOD, bad], vocabulary=100, longest=50)


def test_what_the_mask_hides_may_be_anything() -> None:
    nan = float("nan")
    check_samples([replace(GOOD, advantages=(nan, nan, 1.0), logprobs=(nan, nan, -1.0))], vocabulary=100, longest=50)


def test_lengths_far_apart_do_not_pad_one_another() -> None:
    def row(length: int) -> Sample:
        return Sample((1,) * length, (0,) + (1,) * (length - 1), *((0.0,) * length,) * 3)

    batches = micro_batches([row(40) for _ in range(40)] + [row(400) for _ in range(10)], 8192)
    assert [tuple(batch.token_ids_BT.shape) for batch in batches] == [(40, 40), (10, 400)]
