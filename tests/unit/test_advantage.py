"""Invariants of advantages and loss weights: what makes domains on different scales train side by side."""

import json
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reward.advantage import Normalizer, token_weights
from reward.score import Score, Status

LEVELS = st.sampled_from([0.0, 0.1, 1 / 3, 0.5, 0.7, 1.0])
GROUP = st.lists(st.one_of(LEVELS, st.none()), min_size=1, max_size=5)
"""Totals of a group; None stands for an episode that infrastructure spoilt."""
BATCH = st.dictionaries(st.sampled_from(["code", "math", "terminal"]), st.lists(GROUP, max_size=4), min_size=1)
SCALES = st.sampled_from([1e-3, 0.37, 7.0, 1e3])


def scored(total: float | None) -> Score:
    if total is None:
        return Score.infra_error("the sandbox was lost")
    return Score({"success": total}, total, total >= 1.0, Status.OK)


def scores(batch):
    return {name: [[scored(total) for total in group] for group in groups] for name, groups in batch.items()}


def flat(advantages):
    return [advantage for groups in advantages.values() for group in groups for advantage in group]


def assert_close(left, right):
    assert [a is None for a in flat(left)] == [a is None for a in flat(right)]
    for a, b in zip(flat(left), flat(right), strict=True):
        assert a is None or a == pytest.approx(b, rel=1e-6, abs=1e-9)


def transform(batch, name, scale, shift=0.0):
    changed = [[None if r is None else r * scale + shift for r in group] for group in batch.get(name, [])]
    return {**batch, name: changed} if name in batch else batch


@given(BATCH, SCALES)
def test_scaling_one_domains_reward_changes_no_advantage(batch, scale):
    plain = Normalizer().advantages(scores(batch))
    assert_close(plain, Normalizer().advantages(scores(transform(batch, "code", scale))))


@given(BATCH, SCALES, st.floats(-100, 100))
def test_shifting_and_scaling_change_no_advantage(batch, scale, shift):
    plain = Normalizer().advantages(scores(batch))
    assert_close(plain, Normalizer().advantages(scores(transform(batch, "code", scale, shift * scale))))


@given(st.lists(BATCH, min_size=2, max_size=4), SCALES)
def test_scale_stays_out_over_many_batches(batches, scale):
    plain, scaled = Normalizer(window=4), Normalizer(window=4)
    for batch in batches:
        assert_close(plain.advantages(scores(batch)), scaled.advantages(scores(transform(batch, "code", scale))))


@given(BATCH, st.randoms(use_true_random=False))
def test_permuting_episodes_permutes_their_advantages_exactly(batch, rng: random.Random):
    plain = Normalizer().advantages(scores(batch))
    orders = {name: [rng.sample(range(len(g)), len(g)) for g in groups] for name, groups in batch.items()}
    permuted = {
        name: [[group[i] for i in order] for group, order in zip(groups, orders[name], strict=True)]
        for name, groups in batch.items()
    }
    result = Normalizer().advantages(scores(permuted))
    for name, groups in plain.items():
        for group, order, after in zip(groups, orders[name], result[name], strict=True):
            assert [group[i] for i in order] == after


@settings(max_examples=20)
@given(st.integers(0, 2**32))
def test_permuting_groups_permutes_their_advantages_exactly(seed):
    rng = random.Random(seed)
    groups = [[rng.random() for _ in range(4)] for _ in range(32)]
    plain = Normalizer().advantages(scores({"code": groups}))["code"]
    assert Normalizer().advantages(scores({"code": groups[::-1]}))["code"] == plain[::-1]


@given(BATCH)
def test_no_signal_gives_none_and_graded_advantages_sum_to_zero(batch):
    for name, groups in Normalizer().advantages(scores(batch)).items():
        for totals, advantages in zip(batch[name], groups, strict=True):
            graded = [total for total in totals if total is not None]
            if len(set(graded)) < 2:
                assert advantages == [None] * len(totals)
            else:
                assert [a is None for a in advantages] == [total is None for total in totals]
                assert math.fsum(a for a in advantages if a is not None) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("dead", [[], [0.5], [1.0] * 8, [None] * 4, [None, 1.0], [0.0, None, 0.0]], ids=repr)
@given(BATCH)
def test_groups_without_signal_leave_statistics_and_denominators(dead, batch):
    plain, fed = Normalizer(), Normalizer()
    first = plain.advantages(scores(batch))
    padded = {name: [*groups, dead] for name, groups in batch.items()}
    second = fed.advantages(scores(padded))
    assert {name: groups[:-1] for name, groups in second.items()} == first
    assert plain.state_dict() == fed.state_dict()
    shares = {"code": 1.0, "math": 2.0, "terminal": 3.0}
    lengths = {name: [[7] * len(group) for group in groups] for name, groups in batch.items()}
    padded_lengths = {name: [[7] * len(group) for group in groups] for name, groups in padded.items()}
    assert token_weights(first, lengths, shares) == token_weights(second, padded_lengths, shares)


@given(st.lists(BATCH, min_size=1, max_size=4), BATCH)
def test_statistics_restore_bit_for_bit_through_json(batches, last):
    original = Normalizer(window=5)
    for batch in batches:
        original.advantages(scores(batch))
    restored = Normalizer(window=5)
    restored.load_state_dict(json.loads(json.dumps(original.state_dict())))
    assert restored.state_dict() == original.state_dict()
    assert restored.advantages(scores(last)) == original.advantages(scores(last))


@given(BATCH)
def test_duplicating_one_domains_rows_leaves_the_others(batch):
    plain = Normalizer().advantages(scores(batch))
    doubled = Normalizer().advantages(scores({**batch, "code": batch.get("code", [[0.0, 1.0]]) * 2}))
    for name in set(batch) - {"code"}:
        assert doubled[name] == plain[name]


def test_duplicated_rows_leave_the_weights_of_the_others():
    batch = {"code": [[0.0, 1.0]], "math": [[0.0, 1.0]]}
    shares = {"code": 1.0, "math": 3.0}

    def weights(batch):
        lengths = {name: [[10] * len(group) for group in groups] for name, groups in batch.items()}
        return token_weights(Normalizer().advantages(scores(batch)), lengths, shares)

    once, twice = weights(batch), weights({**batch, "code": batch["code"] * 2})
    assert twice["math"] == once["math"] == 0.75 / 20
    assert twice["code"] == once["code"] / 2


@pytest.mark.parametrize("jump", [1e-3, 1e3])
def test_the_deviation_forgets_an_old_scale_within_its_window(jump):
    normalizer, window, per_batch = Normalizer(window=16), 16, 4
    before = {"code": [[0.0, 1.0, 1.0, 0.0]] * per_batch}
    for _ in range(10):
        settled = normalizer.advantages(scores(before))
    after = transform(before, "code", jump)
    first = normalizer.advantages(scores(after))
    overshoot = max(abs(a) for a in flat(first)) / max(abs(a) for a in flat(settled))
    assert overshoot <= math.sqrt(window / per_batch) * (1 + 1e-9)
    for _ in range(window // per_batch - 1):
        last = normalizer.advantages(scores(after))
    assert_close(last, settled)
    assert len(normalizer.state_dict()["variances"]["code"]) == window


def test_memory_stays_bounded_when_a_batch_exceeds_it():
    normalizer = Normalizer(window=2)
    small, large = [0.0, 0.5], [0.0, 1.0]
    advantages = normalizer.advantages(scores({"code": [small, large, large, large]}))
    assert len(normalizer.state_dict()["variances"]["code"]) == 2
    # All four groups count in their own batch: σ² = (0.125 + 3 · 0.5) / 4.
    assert advantages["code"][1] == [pytest.approx(-0.5 / math.sqrt(0.40625)), pytest.approx(0.5 / math.sqrt(0.40625))]


def test_rounding_is_no_signal():
    assert Normalizer().advantages(scores({"math": [[0.1 + 0.2, 0.3, 0.3]]})) == {"math": [[None] * 3]}


def test_a_window_of_nothing_is_refused():
    with pytest.raises(ValueError, match="window = 0"):
        Normalizer(window=0)


# Loss weights.


def mass(advantages, lengths, weights):
    """Each domain's share of Σ |weight · advantage| over trained tokens."""
    masses = {
        name: sum(
            weights[name] * abs(a) * tokens
            for group, counts in zip(groups, lengths[name], strict=True)
            for a, tokens in zip(group, counts, strict=True)
            if a is not None
        )
        for name, groups in advantages.items()
    }
    total = sum(masses.values())
    return {name: part / total for name, part in masses.items()}


@settings(max_examples=20)
@given(st.integers(0, 2**32), st.sampled_from([1e-3, 1.0, 1e3]))
def test_length_and_scale_leave_the_shares_as_configured(seed, scale):
    rng = random.Random(seed)
    shares = {"long": 1.0, "short": 3.0}
    batch = {name: [[float(rng.random() < 0.5) for _ in range(8)] for _ in range(64)] for name in shares}
    lengths = {
        name: [[int(rng.uniform(0.8, 1.2) * tokens) for _ in range(8)] for _ in range(64)]
        for name, tokens in (("long", 5000), ("short", 100))
    }
    advantages = Normalizer().advantages(scores(transform(batch, "long", scale)))
    found = mass(advantages, lengths, token_weights(advantages, lengths, shares))
    assert found["long"] == pytest.approx(0.25, rel=0.05)
    assert found["short"] == pytest.approx(0.75, rel=0.05)


@given(BATCH)
def test_each_domain_with_signal_gets_its_share_of_token_weight(batch):
    shares = {"code": 1.0, "math": 2.0, "terminal": 5.0}
    lengths = {name: [[i + 1 for i, _ in enumerate(g)] for g in groups] for name, groups in batch.items()}
    advantages = Normalizer().advantages(scores(batch))
    weights = token_weights(advantages, lengths, shares)
    total = sum(shares[name] for name in batch)
    for name, groups in advantages.items():
        trained = sum(
            tokens
            for group, counts in zip(groups, lengths[name], strict=True)
            for a, tokens in zip(group, counts, strict=True)
            if a is not None
        )
        expected = shares[name] / total if trained else 0.0
        assert weights[name] * trained == pytest.approx(expected)


def test_a_domain_without_signal_leaves_its_share_unused():
    advantages = Normalizer().advantages(scores({"code": [[1.0, 1.0]], "math": [[0.0, 1.0]]}))
    weights = token_weights(advantages, {"code": [[5, 5]], "math": [[10, 10]]}, {"code": 1.0, "math": 1.0})
    assert weights == {"code": 0.0, "math": 0.5 / 20}


def test_an_average_episode_of_a_group_with_signal_counts_in_the_denominator():
    advantages = Normalizer().advantages(scores({"code": [[0.0, 0.5, 1.0]]}))
    assert advantages["code"][0][1] == 0.0
    assert token_weights(advantages, {"code": [[4, 4, 4]]}, {"code": 1.0}) == {"code": 1 / 12}
