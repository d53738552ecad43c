"""What a trainer step costs over the bare forward, backward and optimiser step of the same batch.

Variants take turns within one process, so that a busy machine slows all of them alike. `bare` is given ready tensors
and computes nothing but a policy gradient; the trainer starts from samples, and adds ratios, weights, the router's
term, the figures it reports, and each tag's share of the gradient.

    python benchmarks/trainer_step.py --out trainer_step.json
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from trainer.batching import micro_batches
from trainer.config import SftConfig, TrainerConfig
from trainer.losses import token_logprobs
from trainer.policy import init_policy, load_policy
from trainer.sample import Sample
from trainer.sft import Demonstration, SftStage
from trainer.step import Trainer


def make_samples(tags: int, each: int, shortest: int, longest: int) -> list[Sample]:
    """Random samples: a third prompt, the rest trained."""
    draw = random.Random(0)
    samples = []
    for tag in range(tags):
        for _ in range(each):
            length = draw.randint(shortest, longest)
            prompt = length // 3
            advantage, weight = draw.choice((-1.0, 1.0)), 1.5 / (tags * each * length)
            samples.append(
                Sample(
                    tuple(draw.randrange(256) for _ in range(length)),
                    (0,) * prompt + (1,) * (length - prompt),
                    (-5.5,) * length,
                    (advantage,) * length,
                    (weight,) * length,
                    f"tag-{tag}",
                )
            )
    return samples


def bare_step(path: Path, samples: list[Sample], config: TrainerConfig) -> Callable[[], object]:
    """Forward, backward and AdamW over the trainer's own micro-batches, made beforehand."""
    model, _ = load_policy(path)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    batches = micro_batches(samples, config.micro_tokens)

    def step() -> None:
        for batch in batches:
            logits = model(input_ids=batch.token_ids_BT, use_cache=False).logits.flatten(0, 1)[batch.predictors_N]
            (-batch.weights_N * batch.advantages_N * token_logprobs(logits, batch.targets_N)).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def sft_step(path: Path, samples: list[Sample], config: TrainerConfig) -> Callable[[], object]:
    """A supervised step on the same tokens."""
    rows = [Demonstration(sample.token_ids, sample.loss_mask, sample.tag) for sample in samples]
    stage = SftStage(path, SftConfig(steps=1000, threads=config.threads), config)
    return lambda: stage.sft_step(rows)


def measure(variants: dict[str, Callable[[], object]], rounds: int) -> dict[str, dict[str, float]]:
    """Median wall and CPU seconds of each variant; the first round warms up."""
    wall: dict[str, list[float]] = {name: [] for name in variants}
    cpu: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds + 1):
        for name, step in variants.items():
            started, spent = time.perf_counter(), time.process_time()
            step()
            wall[name].append(time.perf_counter() - started)
            cpu[name].append(time.process_time() - spent)
    return {
        name: {"wall_s": statistics.median(wall[name][1:]), "cpu_s": statistics.median(cpu[name][1:])}
        for name in variants
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a Hugging Face directory; default: a new tiny-moe")
    parser.add_argument("--tags", type=int, default=4)
    parser.add_argument("--samples", type=int, default=64, help="of each tag")
    parser.add_argument("--lengths", type=int, nargs=2, default=(40, 100), metavar=("SHORTEST", "LONGEST"))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    arguments = parser.parse_args()
    samples = make_samples(arguments.tags, arguments.samples, *arguments.lengths)
    with tempfile.TemporaryDirectory() as directory:
        path = arguments.model
        if path is None:
            path = Path(directory) / "tiny-moe"
            init_policy("tiny-moe", path, seed=0)
        config = TrainerConfig(threads=arguments.threads, learning_rate=1e-5)
        plain = config.model_copy(update={"gradient_shares": False})
        trainers = {"trainer": Trainer(path, config), "without_shares": Trainer(path, plain)}
        figures = measure(
            {
                "bare": bare_step(path, samples, config),
                **{name: lambda t=trainer: t.train_step(samples) for name, trainer in trainers.items()},
                "sft": sft_step(path, samples, config),
            },
            arguments.rounds,
        )
    ratio = {name: figures[name]["cpu_s"] / figures["bare"]["cpu_s"] for name in figures}
    report = {
        "tokens": sum(len(sample.token_ids) for sample in samples),
        "samples": len(samples),
        "threads": arguments.threads,
        "rounds": arguments.rounds,
        "median": figures,
        "cpu_ratio_to_bare": ratio,
    }
    for name, row in figures.items():
        print(f"{name:15} {row['wall_s']:.3f} s wall  {row['cpu_s']:.3f} s cpu  {ratio[name]:.2f} x bare")
    if arguments.out:
        arguments.out.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
