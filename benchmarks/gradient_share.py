"""Share of each domain in the gradient norm when one domain's reward is multiplied by 1000.

    python -m benchmarks.gradient_share --out gradient_share.json

The same episodes of four domains are scored by `domain.toml`-like declarations on their own scale, then with one
domain's reward (and its declared range) multiplied by 1000, and trained for one step from the same weights. Also
printed: what the shares become without any normalisation, that is with raw rewards less their group's mean as
advantages.
"""

import argparse
import json
import random
import tempfile
from pathlib import Path

from orchestrator.run.batch import BatchBuilder
from reward.config import ComponentConfig, DomainConfig
from reward.score import Status
from reward.scoring import score
from reward.task import Task
from rollout_workers.types import Episode
from trainer.config import TrainerConfig
from trainer.policy import init_policy
from trainer.sample import Sample
from trainer.step import Trainer

DOMAINS = ("terminal", "code", "math", "tools")
GROUPS, SIZE, PROMPT, TOKENS = 4, 8, 24, 12


def domain(name: str, scale: float) -> DomainConfig:
    """One outcome component from 0 to `scale`."""
    return DomainConfig(
        name=name, environment="terminal", components={"points": ComponentConfig(range=(0.0, scale), kind="outcome")}
    )


def episodes(scales: dict[str, float]) -> dict[str, list[list[Episode]]]:
    """The same transcripts and outcomes whatever the scales."""
    rng = random.Random(0)
    result: dict[str, list[list[Episode]]] = {}
    for name in DOMAINS:
        config = domain(name, scales[name])
        groups = []
        for _ in range(GROUPS):
            prompt = tuple(rng.randrange(256) for _ in range(PROMPT))
            group = []
            for index in range(SIZE):
                ids = prompt + tuple(rng.randrange(256) for _ in range(TOKENS))
                raw = {"points": scales[name] * rng.choice((0.0, 0.25, 0.5, 1.0))}
                group.append(
                    Episode(
                        id=str(index),
                        domain=name,
                        task_id="t",
                        token_ids=ids,
                        loss_mask=(0,) * PROMPT + (1,) * TOKENS,
                        logprobs=(0.0,) * PROMPT + (-5.5,) * TOKENS,
                        versions=(-1,) * PROMPT + (0,) * TOKENS,
                        turns=(),
                        score=score(config, Task("t", name, "train", ""), raw, Status.OK),
                        seconds=0.0,
                    )
                )
            groups.append(group)
        result[name] = groups
    return result


def normalised(scales: dict[str, float]) -> tuple[Sample, ...]:
    """Samples as a run builds them."""
    return BatchBuilder(dict.fromkeys(DOMAINS, 1.0), deviation_memory=64).build(0, episodes(scales)).samples


def raw(scales: dict[str, float]) -> tuple[Sample, ...]:
    """Samples with raw rewards less the group's mean, for comparison."""
    samples = []
    for name, groups in episodes(scales).items():
        for group in groups:
            rewards = [episode.score.components["points"] for episode in group]
            mean = sum(rewards) / len(rewards)
            for episode, reward in zip(group, rewards, strict=True):
                credit = tuple((reward - mean) * bit for bit in episode.loss_mask)
                weight = 1.0 / (len(DOMAINS) * GROUPS * SIZE * TOKENS)
                samples.append(
                    Sample(
                        episode.token_ids, episode.loss_mask, episode.logprobs, credit, (weight,) * len(credit), name
                    )
                )
    return tuple(samples)


def shares(samples: tuple[Sample, ...], policy: Path) -> dict[str, float]:
    """Each domain's share in the sum of the domains' gradient norms, of one step from the same weights."""
    return dict(Trainer(policy, TrainerConfig(), seed=0).train_step(samples).gradient_share)


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    plain: dict[str, float] = dict.fromkeys(DOMAINS, 1.0)
    with tempfile.TemporaryDirectory() as folder:
        policy = Path(folder) / "policy"
        init_policy("tiny-moe", policy, 0)
        base, base_raw = shares(normalised(plain), policy), shares(raw(plain), policy)
        moved, moved_raw = {}, {}
        for name in DOMAINS:
            scaled = plain | {name: 1000.0}
            moved[name] = max(abs(shares(normalised(scaled), policy)[d] - base[d]) for d in DOMAINS)
            moved_raw[name] = max(abs(shares(raw(scaled), policy)[d] - base_raw[d]) for d in DOMAINS)
    result = {"shares": base, "largest_move": moved, "largest_move_without_normalisation": moved_raw}
    arguments.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
