"""vLLM fetching its weights through the channel, as an engine on another machine does: parity and refusals.

One engine serves the whole module, since a start takes 15 s. Each test brings a trainer of its own.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from torch._C._distributed_c10d import TCPStore

from rollout_workers.config import EngineConfig
from rollout_workers.engines.vllm import VllmEngine
from rollout_workers.errors import WeightSyncRejected
from rollout_workers.parity import compare
from trainer.policy import init_policy, load_policy
from trainer.publish import Publisher

pytestmark = [pytest.mark.integration, pytest.mark.asyncio(loop_scope="module")]
CONFIG = EngineConfig(max_num_seqs=16, kv_cache_mb=16)
PROBE = [[(7 * index * row) % 256 for index in range(1, 60)] for row in range(1, 5)]
CHUNK = 1 << 12
"""Bytes: 2,000 chunks a set, which take a second, so that a trainer can end in the middle."""


class DistantTrainer:
    """A trainer on another machine, going by what its manifests say."""

    def __init__(self, policy: Path, directory: Path, **settings: Any) -> None:
        self.model = load_policy(policy)[0]
        self.publisher = Publisher(self.model, "distant", directory, **settings)
        self.noise = torch.Generator().manual_seed(0)
        self.segment = ""

    def step(self, version: int) -> dict[str, Any]:
        """Move every weight a little, as an optimiser does, and publish."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=self.noise), alpha=0.02)
        manifest = self.publisher.publish(version)
        if segment := manifest.get("segment"):
            self.segment = segment["path"]
            manifest["segment"] = {**segment, "boot_id": "another machine"}
        return manifest

    def spoil(self) -> None:
        """Change one bit of what was published last, and so of what is sent."""
        with open(self.segment, "r+b") as file:
            file.seek(1000)
            byte = file.read(1)[0]
            file.seek(1000)
            file.write(bytes([byte ^ 1]))

    def logprobs(self, token_ids: Sequence[int]) -> list[float]:
        tokens_T = torch.tensor(token_ids)
        with torch.no_grad():
            logits_TV = self.model(tokens_T[None]).logits[0, :-1]
        return logits_TV.log_softmax(-1).gather(1, tokens_T[1:, None])[:, 0].tolist()


Start = Callable[..., DistantTrainer]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("channel") / "policy"
    init_policy("tiny-moe", directory, seed=1)
    return directory


@pytest.fixture
def start(policy: Path, tmp_path: Path) -> Iterator[Start]:
    made: list[DistantTrainer] = []

    def make(**settings: Any) -> DistantTrainer:
        made.append(DistantTrainer(policy, tmp_path, **settings))
        return made[-1]

    yield make
    for trainer in made:
        trainer.publisher.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(policy: Path) -> AsyncIterator[VllmEngine]:
    made = VllmEngine(str(policy), CONFIG)
    try:
        await made.start()
        yield made
    finally:
        await made.close()


async def assert_parity(engine: VllmEngine, trainer: DistantTrainer) -> None:
    answers = await asyncio.gather(*(engine.token_logprobs(sequence) for sequence in PROBE))
    assert compare(answers, [trainer.logprobs(sequence) for sequence in PROBE]).max_gap < CONFIG.parity_tolerance


async def assert_refused(engine: VllmEngine, manifest: dict[str, Any], reason: str) -> None:
    """The update is refused for this reason and leaves the engine as it was."""
    served, before = engine.version, await engine.token_logprobs(PROBE[0])
    with pytest.raises(WeightSyncRejected, match=reason):
        await engine.update_weights(manifest)
    assert engine.version == served
    assert await engine.token_logprobs(PROBE[0]) == before


@pytest.mark.parametrize("on_device", [False, True])
async def test_parity_holds_over_updates_through_the_channel(engine: VllmEngine, start: Start, on_device: bool) -> None:
    trainer = start(on_device=on_device)
    for _ in range(4):
        manifest = trainer.step(engine.version + 1)
        receipt = await engine.update_weights(manifest)
        assert receipt.checksum == manifest["checksum"]
        await assert_parity(engine, trainer)
    await engine.update_weights(manifest)  # as after a probe that failed
    await assert_parity(engine, trainer)


async def test_requests_go_on_over_an_update_through_the_channel(engine: VllmEngine, start: Start) -> None:
    trainer = start(on_device=True)
    request = engine.generate([3, 50, 60], request_id="flight", max_tokens=400, temperature=1.0, seed=3)
    answer, receipt = await asyncio.gather(request, engine.update_weights(trainer.step(engine.version + 1)))
    assert set(answer.versions) <= {receipt.version - 1, receipt.version}
    await assert_parity(engine, trainer)


async def test_a_version_that_is_gone_is_refused(engine: VllmEngine, start: Start) -> None:
    trainer = start(on_device=True)
    old = trainer.step(engine.version + 1)
    for version in (2, 3):
        new = trainer.step(engine.version + version)
    await assert_refused(engine, old, f"no slot of the trainer holds version {old['version']} any more")
    await engine.update_weights(new)
    await assert_parity(engine, trainer)


async def test_a_byte_that_changes_on_its_way_is_noticed(engine: VllmEngine, start: Start) -> None:
    trainer = start()
    spoilt = trainer.step(engine.version + 1)
    trainer.spoil()
    await assert_refused(engine, spoilt, "has checksum")
    await engine.update_weights(trainer.step(engine.version + 1))
    await assert_parity(engine, trainer)


async def test_weights_that_are_not_finite_are_refused(engine: VllmEngine, start: Start) -> None:
    trainer = start(on_device=True)
    with torch.no_grad():
        weight = trainer.model.get_input_embeddings().weight
        weight[3, 5] = float("nan")
        spoilt = trainer.step(engine.version + 1)
        weight[3, 5] = 0.0
    await assert_refused(engine, spoilt, r"embed_tokens.*not finite")
    await engine.update_weights(trainer.step(engine.version + 1))
    await assert_parity(engine, trainer)


async def test_a_trainer_that_closes_while_it_sends_leaves_the_engine_as_it_was(
    engine: VllmEngine, start: Start
) -> None:
    trainer = start(on_device=True, chunk_bytes=CHUNK)
    manifest = trainer.step(engine.version + 1)
    closing = asyncio.get_running_loop().call_later(0.3, trainer.publisher.close)
    await assert_refused(engine, manifest, "waited for the trainer's bytes")
    assert closing.when() < asyncio.get_running_loop().time()
    other = start(on_device=True)
    await engine.update_weights(other.step(engine.version + 1))
    await assert_parity(engine, other)


async def test_a_trainer_that_ends_while_it_is_waited_for_leaves_the_engine_as_it_was(
    engine: VllmEngine, start: Start
) -> None:
    other = start(on_device=True)
    manifest = other.step(engine.version + 1)
    stores = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)]  # listens, and never answers
    silent = {**manifest, "channel": {**manifest["channel"], "host": "127.0.0.1", "port": stores[0].port}}
    asyncio.get_running_loop().call_later(1.0, stores.clear)
    await assert_refused(engine, silent, "to open the channel")
    await engine.update_weights(manifest)
    await assert_parity(engine, other)
