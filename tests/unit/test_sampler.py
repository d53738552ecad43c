"""Exact strata: integer quotas, no task skipped or repeated within a pass, state that restores."""

import json

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.run.sampler import Sampler, largest_remainder
from reward.task import Task

SHARES = st.dictionaries(st.text("abcdef", min_size=1), st.floats(1e-3, 1e3), min_size=1, max_size=6)


def make(sizes: dict[str, int], groups: int, seed: int = 0) -> Sampler:
    tasks = {name: [Task(f"{name}-{i}", name, "train", "") for i in range(size)] for name, size in sizes.items()}
    return Sampler(tasks, groups_per_batch=groups, memory=0.9, seed=seed)


@given(SHARES, st.integers(0, 40))
def test_quotas_sum_to_the_total_and_leave_nobody_out(shares: dict[str, float], more: int) -> None:
    total = len(shares) + more
    quota = largest_remainder(shares, total)
    assert sum(quota.values()) == total
    assert min(quota.values()) >= 1


@given(SHARES, st.integers(0, 40), st.floats(1e-3, 1e3))
def test_quotas_depend_on_ratios_alone(shares: dict[str, float], more: int, scale: float) -> None:
    total = len(shares) + more
    rounded = {name: float(f"{share:.3g}") for name, share in shares.items()}
    doubled = {name: 2 * share for name, share in rounded.items()}
    assert largest_remainder(rounded, total) == largest_remainder(doubled, total)


@given(st.integers(2, 60))
def test_a_larger_share_never_gets_less(total: int) -> None:
    quota = largest_remainder({"small": 1.0, "large": 3.7}, total)
    assert quota["large"] >= quota["small"]


def test_known_quotas() -> None:
    assert largest_remainder({"a": 1, "b": 1, "c": 1}, 16) == {"a": 6, "b": 5, "c": 5}
    assert largest_remainder({"a": 0.5, "b": 0.3, "c": 0.2}, 10) == {"a": 5, "b": 3, "c": 2}


def test_a_domain_with_longer_episodes_gets_fewer_groups() -> None:
    sampler = make({"short": 50, "long": 50}, groups=12)
    for _ in range(100):
        sampler.observe("short", 10)
        sampler.observe("long", 50)
    assert sampler.plan().quota == {"short": 10, "long": 2}


def test_the_even_share_keeps_long_domains_in_business() -> None:
    tasks = {name: [Task(f"{name}-{i}", name, "train", "") for i in range(50)] for name in ("short", "long")}
    sampler = Sampler(tasks, groups_per_batch=12, memory=0.9, seed=0, even_share=0.5)
    for _ in range(100):
        sampler.observe("short", 10)
        sampler.observe("long", 50)
    assert sampler.plan().quota == {"short": 8, "long": 4}  # 3 + 5 and 3 + 1


def test_every_task_is_seen_once_a_pass() -> None:
    sampler = make({"a": 7, "b": 13}, groups=6)
    seen: list[str] = []
    for _ in range(40):
        seen += [task.id for task in sampler.plan().tasks["a"]]
    for start in range(0, len(seen) - 7, 7):
        assert len(set(seen[start : start + 7])) == 7


def test_the_order_differs_between_passes_and_seeds_and_repeats_for_a_seed() -> None:
    def first_pass(seed: int) -> list[str]:
        sampler = make({"a": 30}, groups=30, seed=seed)
        return [task.id for task in sampler.plan().tasks["a"]]

    sampler = make({"a": 30}, groups=30)
    one, two = ([task.id for task in sampler.plan().tasks["a"]] for _ in range(2))
    assert one != two
    assert first_pass(0) == one
    assert first_pass(1) != one


@given(st.integers(0, 10), st.integers(1, 10))
def test_a_restored_sampler_plans_what_the_original_would(before: int, after: int) -> None:
    original = make({"a": 5, "b": 9}, groups=5)
    for _ in range(before):
        original.plan()
        original.observe("a", 3.5)
    restored = make({"a": 5, "b": 9}, groups=5)
    restored.load_state_dict(json.loads(json.dumps(original.state_dict())))
    for _ in range(after):
        assert restored.plan().tasks == original.plan().tasks


def test_a_plan_can_be_made_again_from_its_own_state() -> None:
    sampler = make({"a": 5, "b": 9}, groups=5)
    sampler.plan()
    plan = sampler.plan()
    sampler.load_state_dict(plan.state_before)
    assert sampler.plan().tasks == plan.tasks


def test_tasks_that_left_the_domain_are_dropped_from_a_restored_pass() -> None:
    sampler = make({"a": 10}, groups=3)
    sampler.plan()
    smaller = make({"a": 4}, groups=3)
    smaller.load_state_dict(sampler.state_dict())
    drawn = [task.id for _ in range(4) for task in smaller.plan().tasks["a"]]
    assert set(drawn) <= {f"a-{i}" for i in range(4)}
