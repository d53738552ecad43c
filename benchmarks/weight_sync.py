"""Seconds of a weight update, from the trainer's tensors to proven weights in the engine: alone, and under load.

    python -m benchmarks.weight_sync --out weight_sync.json

Export is the copy into shared memory with its checksum. Update is what the engine does: wait for its step to end, check
the set, load it, repair the copies that kernels keep, confirm the checksum. Busy means as many requests at once as the
quickstart has episodes in a batch.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

from benchmarks.sandboxes import summary
from rollout_workers.config import EngineConfig
from rollout_workers.engines.vllm import VllmEngine
from trainer.policy import init_policy, load_policy
from trainer.publish import Publisher

REQUESTS = 160
PROMPT_TOKENS = 40
ANSWER_TOKENS = 12
PAUSE_S = 0.25
"""Between two updates, so that the engine is at work again when the next one comes."""


async def measure(updates: int) -> dict[str, list[float]]:
    """Seconds of each part, first of an idle engine, then of a busy one."""
    seconds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="ct-") as root:
        directory = Path(root) / "policy"
        init_policy("tiny-moe", directory, seed=0)
        publisher = Publisher(load_policy(directory)[0], f"bench-{os.getpid()}")
        engine = VllmEngine(str(directory), EngineConfig(max_model_len=256))
        versions = itertools.count(1)
        try:
            await engine.start()
            for name, requests in (("idle", 0), ("busy", REQUESTS)):
                async with load(engine, requests):
                    for _ in range(updates):
                        await asyncio.sleep(PAUSE_S)
                        began = time.perf_counter()
                        manifest = publisher.publish(next(versions))
                        export_s = time.perf_counter() - began
                        update = await engine.update_weights(manifest)
                        assert update.checksum == manifest["checksum"]
                        seconds.setdefault(f"export, {name}", []).append(export_s)
                        seconds.setdefault(f"update, {name}", []).append(update.seconds)
                        seconds.setdefault(f"both, {name}", []).append(export_s + update.seconds)
        finally:
            publisher.close()
            await engine.close()
    return seconds


@contextlib.asynccontextmanager
async def load(engine: VllmEngine, requests: int) -> AsyncIterator[None]:
    """Keep so many requests in flight."""

    async def ask(row: int) -> None:
        for turn in itertools.count():
            prompt = [(7 * row + 13 * turn + index) % 256 for index in range(PROMPT_TOKENS)]
            name = f"load-{row}-{turn}"
            await engine.generate(prompt, request_id=name, max_tokens=ANSWER_TOKENS, temperature=1.0, seed=turn)

    asking = [asyncio.create_task(ask(row)) for row in range(requests)]
    try:
        yield
        assert not any(task.done() for task in asking), "the load ended early"
    finally:
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=40, help="of the idle and of the busy engine each")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    results = {name: summary(times) for name, times in asyncio.run(measure(arguments.updates)).items()}
    print(f"{'':24}{'n':>6}{'p50 ms':>10}{'p95 ms':>10}")
    for name, row in results.items():
        print(f"{name:24}{row['n']:6}{row['p50_ms']:10.1f}{row['p95_ms']:10.1f}")
    if arguments.out:
        arguments.out.write_text(json.dumps({"processors": os.cpu_count(), "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
