"""vLLM as an engine, against the trainer's own arithmetic: parity, updates in the middle of requests, refusals, death.

One engine serves the whole module, since a start takes 15 s; the last test kills it.
"""

import asyncio
import hashlib
import math
import multiprocessing
import os
import signal
import struct
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from transformers import PreTrainedModel

from rollout_workers.config import EngineConfig
from rollout_workers.engines.base import Generation
from rollout_workers.engines.vllm import VllmEngine
from rollout_workers.errors import EngineFailed, WeightSyncRejected
from rollout_workers.parity import ParityResult, compare
from trainer.policy import init_policy, load_policy
from trainer.publish import Publisher

pytestmark = [pytest.mark.integration, pytest.mark.asyncio(loop_scope="module")]
CONFIG = EngineConfig(max_num_seqs=16, kv_cache_mb=16)
TOLERANCE = CONFIG.parity_tolerance
PROBE = [[(7 * index * row) % 256 for index in range(1, 60)] for row in range(1, 5)]


class SwitchableEngine(VllmEngine):
    """Can be told to leave out repairs after a reload."""

    receiver = "vllm_repair_switch.RepairSwitch"

    async def leave_out(self, repair: str) -> None:
        async with self._running() as llm:
            await llm.collective_rpc("leave_out", args=(repair,))


class Trainer:
    """The weights that are published and what they make of tokens."""

    def __init__(self, model: PreTrainedModel, segments: Path) -> None:
        self.model = model
        self.publisher = Publisher(model, "integration", segments)
        self.noise = torch.Generator().manual_seed(0)

    def step(self) -> None:
        """Move every weight a little, as an optimiser does."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=self.noise), alpha=0.02)

    def logprobs(self, token_ids: Sequence[int], temperature: float = 1.0) -> list[float]:
        return logprobs(self.model, token_ids, temperature)


def logprobs(model: PreTrainedModel, token_ids: Sequence[int], temperature: float = 1.0) -> list[float]:
    tokens_T = torch.tensor(token_ids)
    with torch.no_grad():
        logits_TV = model(tokens_T[None]).logits[0, :-1] / temperature
    return logits_TV.log_softmax(-1).gather(1, tokens_T[1:, None])[:, 0].tolist()


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("integration") / "policy"
    init_policy("tiny-moe", directory, seed=1)
    return directory


@pytest.fixture(scope="module")
def trainer(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainer]:
    made = Trainer(load_policy(policy)[0], tmp_path_factory.mktemp("segments"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the other core is the engine's
    yield made
    torch.set_num_threads(threads)
    made.publisher.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(policy: Path) -> AsyncIterator[SwitchableEngine]:
    made = SwitchableEngine(str(policy), CONFIG)
    try:
        await made.start()
        yield made
    finally:
        await made.close()
        assert not multiprocessing.active_children()


async def gap(engine: VllmEngine, trainer: Trainer) -> ParityResult:
    answers = await asyncio.gather(*(engine.token_logprobs(sequence) for sequence in PROBE))
    return compare(answers, [trainer.logprobs(sequence) for sequence in PROBE])


def ask(engine: VllmEngine, prompt: Sequence[int], name: str, **settings: Any) -> "asyncio.Future[Generation]":
    settings = {"max_tokens": 40, "temperature": 1.0, "seed": 5} | settings
    return asyncio.ensure_future(engine.generate(prompt, request_id=name, **settings))


async def test_engine_and_trainer_agree_on_the_weights_of_the_directory(
    engine: SwitchableEngine, trainer: Trainer
) -> None:
    assert (await gap(engine, trainer)).max_gap < TOLERANCE


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.5])
async def test_logprobs_are_those_of_the_distribution_drawn_from(
    engine: SwitchableEngine, trainer: Trainer, temperature: float
) -> None:
    prompt = [3, 1, 4]
    answer = await ask(engine, prompt, "tempered", temperature=temperature)
    expected = trainer.logprobs([*prompt, *answer.token_ids], temperature)[len(prompt) - 1 :]
    assert compare([answer.logprobs], [expected]).max_gap < TOLERANCE


async def test_temperature_zero_takes_the_likeliest_token(engine: SwitchableEngine, trainer: Trainer) -> None:
    prompt = [2, 7, 1]
    answer = await ask(engine, prompt, "greedy", temperature=0.0, max_tokens=12)
    with torch.no_grad():
        logits_TV = trainer.model(torch.tensor([[*prompt, *answer.token_ids]])).logits[0, len(prompt) - 1 : -1]
    assert list(answer.token_ids) == logits_TV.argmax(-1).tolist()


@pytest.mark.parametrize("repair", ["repack_experts", "repack_output"])
async def test_each_repair_is_needed_and_only_the_probe_sees_it(
    engine: SwitchableEngine, trainer: Trainer, repair: str
) -> None:
    trainer.step()
    version = engine.version + 1
    manifest = trainer.publisher.publish(version)
    await engine.leave_out(repair)
    receipt = await engine.update_weights(manifest)
    assert receipt.checksum == manifest["checksum"]
    assert (await gap(engine, trainer)).max_gap > 100 * TOLERANCE
    await engine.leave_out("none")
    await engine.update_weights(manifest)
    assert (await gap(engine, trainer)).max_gap < TOLERANCE


async def test_parity_holds_over_many_updates(engine: SwitchableEngine, trainer: Trainer) -> None:
    for _ in range(8):
        trainer.step()
        await engine.update_weights(trainer.publisher.publish(engine.version + 1))
        assert (await gap(engine, trainer)).max_gap < TOLERANCE


async def test_each_token_of_a_request_matches_the_weights_of_its_version(
    engine: SwitchableEngine, trainer: Trainer
) -> None:
    for wait_s in (0.1, 0.4, 1.6, 6.4):  # as long as it takes until some have begun and not all have ended
        models = {engine.version: deepcopy(trainer.model)}
        prompts = [[number, 50, 60] for number in range(8)]
        requests = [ask(engine, prompt, f"flight-{prompt[0]}", max_tokens=300, seed=prompt[0]) for prompt in prompts]
        await asyncio.sleep(wait_s)
        trainer.step()
        models[engine.version + 1] = trainer.model
        await engine.update_weights(trainer.publisher.publish(engine.version + 1))
        answers = await asyncio.gather(*requests)
        if any(len(set(answer.versions)) == 2 for answer in answers):
            break
    else:
        pytest.fail("no request was in flight during an update")
    for prompt, answer in zip(prompts, answers, strict=True):
        by_version = {v: logprobs(m, [*prompt, *answer.token_ids])[len(prompt) - 1 :] for v, m in models.items()}
        expected = [by_version[version][index] for index, version in enumerate(answer.versions)]
        assert compare([answer.logprobs], [expected]).max_gap < TOLERANCE


async def test_turns_share_the_prefix_cache_until_the_weights_change(
    engine: SwitchableEngine, trainer: Trainer
) -> None:
    prompt = [index % 251 for index in range(300)]

    async def cached(name: str) -> int:
        before = (await engine.stats()).cached_prompt_tokens
        await ask(engine, prompt, name, max_tokens=2)
        return (await engine.stats()).cached_prompt_tokens - before

    assert await cached("first") == 0
    assert await cached("second") == 288  # whole blocks of 32
    before = (await engine.stats()).cached_prompt_tokens
    await engine.token_logprobs(prompt)
    assert (await engine.stats()).cached_prompt_tokens == before
    await engine.update_weights(trainer.publisher.publish(engine.version + 1))
    assert await cached("third") == 0


async def test_seeded_prompts_beyond_one_step_are_served(engine: SwitchableEngine) -> None:
    """vLLM on the CPU dies of a seeded request whose prompt it computes in parts."""
    prompts = [[(row * index) % 256 for index in range(400)] for row in range(1, 25)]
    answers = await asyncio.gather(*(ask(engine, prompt, f"part-{prompt[1]}", max_tokens=4) for prompt in prompts))
    assert all(answer.token_ids for answer in answers)


async def test_a_prompt_without_room_for_an_answer_fails_alone(engine: SwitchableEngine) -> None:
    with pytest.raises(EngineFailed, match=r"refused.*512"):
        await ask(engine, [1] * 600, "long")
    assert (await ask(engine, [1] * 500, "fits", max_tokens=100)).finish_reason in ("length", "stop")


def drop_a_tensor(manifest: dict[str, Any]) -> None:
    manifest["tensors"] = manifest["tensors"][:-1]


def change_a_shape(manifest: dict[str, Any]) -> None:
    last = manifest["tensors"][-1]
    manifest["tensors"] = [*manifest["tensors"][:-1], {**last, "shape": [1, *last["shape"]]}]


def point_past_the_end(manifest: dict[str, Any]) -> None:
    last = manifest["tensors"][-1]
    manifest["tensors"] = [*manifest["tensors"][:-1], {**last, "offset": manifest["nbytes"] - 4}]


def claim_integers(manifest: dict[str, Any]) -> None:
    manifest["tensors"] = [{**entry, "dtype": "int32"} for entry in manifest["tensors"]]


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (drop_a_tensor, "1 tensors are missing"),
        (change_a_shape, "has shape"),
        (point_past_the_end, "does not fit"),
        (claim_integers, "dtype int32"),
    ],
)
async def test_a_set_that_is_not_this_models_is_refused_with_a_reason(
    engine: SwitchableEngine, trainer: Trainer, spoil: Callable[[dict[str, Any]], None], reason: str
) -> None:
    served = engine.version
    before = await engine.token_logprobs(PROBE[0])
    good = trainer.publisher.publish(served + 1)
    spoilt = dict(good)
    spoil(spoilt)
    with pytest.raises(WeightSyncRejected, match=reason):
        await engine.update_weights(spoilt)
    assert engine.version == served
    assert await engine.token_logprobs(PROBE[0]) == before
    await engine.update_weights(good)
    assert (await gap(engine, trainer)).max_gap < TOLERANCE


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
async def test_weights_that_are_not_finite_are_refused(
    engine: SwitchableEngine, trainer: Trainer, value: float
) -> None:
    served = engine.version
    before = await engine.token_logprobs(PROBE[0])
    weight = trainer.model.get_input_embeddings().weight
    with torch.no_grad():
        kept = weight[3, 5].clone()
        weight[3, 5] = value
        spoilt = trainer.publisher.publish(served + 1)
        weight[3, 5] = kept
    with pytest.raises(WeightSyncRejected, match=r"embed_tokens.*not finite"):
        await engine.update_weights(spoilt)
    assert await engine.token_logprobs(PROBE[0]) == before
    await engine.update_weights(trainer.publisher.publish(served + 1))
    assert (await gap(engine, trainer)).max_gap < TOLERANCE


def without_padding(good: dict[str, Any], path: Path) -> dict[str, Any]:
    """A set whose last tensor begins a value later, ends with the bytes, and ends with NaN."""
    *others, last = good["tensors"]
    start, end = last["offset"], last["offset"] + 4 * math.prod(last["shape"])
    content = Path(good["segment"]["path"]).read_bytes()
    content = content[:start] + bytes(4) + content[start : end - 4] + struct.pack("=f", math.nan)
    assert len(content) % 8 == 4  # no whole words
    path.write_bytes(content)
    return {
        **good,
        "tensors": [*others, {**last, "offset": start + 4}],
        "nbytes": len(content),
        "checksum": hashlib.sha256(content).hexdigest(),
        "segment": {**good["segment"], "path": str(path)},
    }


async def test_the_last_value_of_a_set_without_padding_is_looked_at_too(
    engine: SwitchableEngine, trainer: Trainer, tmp_path: Path
) -> None:
    good = trainer.publisher.publish(engine.version + 1)
    with pytest.raises(WeightSyncRejected, match=rf"{good['tensors'][-1]['name']}.*not finite"):
        await engine.update_weights(without_padding(good, tmp_path / "set"))
    await engine.update_weights(good)
    assert (await gap(engine, trainer)).max_gap < TOLERANCE


async def test_an_update_whose_caller_is_cancelled_ends_before_the_next(
    engine: SwitchableEngine, trainer: Trainer
) -> None:
    version = engine.version + 1
    update = asyncio.create_task(engine.update_weights(trainer.publisher.publish(version)))
    await asyncio.sleep(0.01)
    update.cancel()
    with pytest.raises(asyncio.CancelledError):
        await update
    trainer.step()
    assert (await engine.update_weights(trainer.publisher.publish(version + 1))).version == version + 1
    assert (await gap(engine, trainer)).max_gap < TOLERANCE


async def test_a_killed_process_fails_what_is_in_flight_and_what_comes(
    engine: SwitchableEngine, trainer: Trainer
) -> None:
    """The last one: it kills the engine that the others share."""
    (process,) = multiprocessing.active_children()
    requests = [ask(engine, [number], f"doomed-{number}", max_tokens=400) for number in range(4)]
    await asyncio.sleep(0.005)
    update = asyncio.create_task(engine.update_weights(trainer.publisher.publish(engine.version + 1)))
    await asyncio.sleep(0)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    ends = await asyncio.gather(*requests, update, engine.token_logprobs(PROBE[0]), return_exceptions=True)
    ends.append((await asyncio.gather(ask(engine, [1], "late"), return_exceptions=True))[0])
    assert all(isinstance(end, EngineFailed) and "exit code -9" in str(end) for end in ends), ends
