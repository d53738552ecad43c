"""What every engine promises, over the scripted one and over vLLM."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from rollout_workers.config import EngineConfig
from rollout_workers.engines.base import Engine, Generation
from rollout_workers.engines.fake import FakeEngine
from rollout_workers.errors import EngineFailed, WeightSyncRejected
from trainer.policy import init_policy, load_policy
from trainer.publish import Publisher

pytestmark = [pytest.mark.contract, pytest.mark.asyncio(loop_scope="module")]
CONFIG = EngineConfig(max_num_seqs=16, kv_cache_mb=16)
PROMPT = (104, 105)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("contract") / "policy"
    init_policy("tiny-moe", directory, seed=0)
    return directory


@pytest.fixture(scope="module")
def eos_id(policy: Path) -> int:
    token = load_policy(policy)[1].eos_token_id
    assert isinstance(token, int)
    return token


@pytest.fixture(scope="module")
def publish(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], dict[str, Any]]]:
    publisher = Publisher(load_policy(policy)[0], "contract", tmp_path_factory.mktemp("segments"))
    yield publisher.publish
    publisher.close()


def script(prompt: tuple[int, ...]) -> list[int]:
    """Long answers to most prompts and short ones to some, as an untrained policy gives."""
    return list(range(20 if sum(prompt) % 3 == 0 else 400))


@pytest_asyncio.fixture(
    scope="module", loop_scope="module", params=["fake", pytest.param("vllm", marks=pytest.mark.integration)]
)
async def engine(request: pytest.FixtureRequest, policy: Path, eos_id: int) -> AsyncIterator[Engine]:
    if request.param == "fake":
        made: Engine = FakeEngine(lambda prompt: [t % 256 for t in script(prompt)], eos_id=eos_id, token_s=0.001)
    else:
        from rollout_workers.engines.vllm import VllmEngine

        made = VllmEngine(str(policy), CONFIG)
    try:
        await made.start()
        yield made
    finally:
        await made.close()


def generate(engine: Engine, number: int, max_tokens: int) -> "asyncio.Future[Generation]":
    return asyncio.ensure_future(
        engine.generate(
            (*PROMPT, number),
            request_id=f"{id(object())}-{number}",
            max_tokens=max_tokens,
            temperature=1.0,
            seed=number,
        )
    )


async def test_tokens_logprobs_and_versions_have_one_length(engine: Engine) -> None:
    answer = await generate(engine, 0, max_tokens=12)
    assert 0 < len(answer.token_ids) == len(answer.logprobs) == len(answer.versions) <= 12
    assert all(logprob <= 0 for logprob in answer.logprobs)
    assert set(answer.versions) == {engine.version}


async def test_an_ended_turn_holds_its_end_token_and_a_cut_one_does_not(engine: Engine, eos_id: int) -> None:
    answers = await asyncio.gather(*(generate(engine, number, max_tokens=96) for number in range(32)))
    stopped = [answer for answer in answers if answer.finish_reason == "stop"]
    cut = [answer for answer in answers if answer.finish_reason == "length"]
    assert stopped and cut
    assert all(answer.token_ids.index(eos_id) == len(answer.token_ids) - 1 for answer in stopped)
    assert all(eos_id not in answer.token_ids and len(answer.token_ids) == 96 for answer in cut)


async def test_a_seed_repeats_the_answer(engine: Engine) -> None:
    first, again = await asyncio.gather(generate(engine, 7, max_tokens=32), generate(engine, 7, max_tokens=32))
    assert first.token_ids == again.token_ids


async def test_logprobs_of_given_tokens_agree_with_those_of_generation(engine: Engine) -> None:
    prompt = (*PROMPT, 3)
    answer = await generate(engine, 3, max_tokens=40)
    given = await engine.token_logprobs((*prompt, *answer.token_ids))
    assert len(given) == len(prompt) + len(answer.token_ids) - 1
    assert given[len(prompt) - 1 :] == pytest.approx(answer.logprobs, abs=1e-4)


async def test_an_update_is_receipted_and_serves_what_starts_later(
    engine: Engine, publish: Callable[[int], dict[str, Any]]
) -> None:
    version = engine.version + 1
    manifest = publish(version)
    receipt = await engine.update_weights(manifest)
    assert (receipt.version, receipt.checksum) == (version, manifest["checksum"])
    assert receipt.seconds > 0
    assert engine.version == version
    assert set((await generate(engine, 1, max_tokens=4)).versions) == {version}


async def test_requests_in_flight_survive_an_update_with_tokens_of_both_versions(
    engine: Engine, publish: Callable[[int], dict[str, Any]]
) -> None:
    for wait_s in (0.1, 0.4, 1.6, 6.4):  # as long as it takes until some have begun and not all have ended
        before = engine.version
        requests = [generate(engine, number, max_tokens=380) for number in range(8)]
        await asyncio.sleep(wait_s)
        await engine.update_weights(publish(before + 1))
        answers = await asyncio.gather(*requests)
        assert all(list(answer.versions) == sorted(answer.versions) for answer in answers)
        if any(set(answer.versions) == {before, before + 1} for answer in answers):
            return
    pytest.fail("no request was in flight during an update")


def cut_segment(manifest: dict[str, Any]) -> None:
    with open(manifest["segment"]["path"], "r+b") as file:
        file.truncate(manifest["nbytes"] // 2)


def flip_byte(manifest: dict[str, Any]) -> None:
    with open(manifest["segment"]["path"], "r+b") as file:
        file.seek(manifest["nbytes"] // 2)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))


def lose_segment(manifest: dict[str, Any]) -> None:
    Path(manifest["segment"]["path"]).unlink()


def forget_checksum(manifest: dict[str, Any]) -> None:
    del manifest["checksum"]


def name_an_older_version(manifest: dict[str, Any]) -> None:
    manifest["version"] = 0


@pytest.mark.parametrize("spoil", [cut_segment, flip_byte, lose_segment, forget_checksum, name_an_older_version])
async def test_a_spoilt_set_is_refused_and_a_good_one_taken_afterwards(
    engine: Engine,
    publish: Callable[[int], dict[str, Any]],
    tmp_path: Path,
    spoil: Callable[[dict[str, Any]], None],
) -> None:
    before = engine.version
    good = publish(before + 1)
    segment = good["segment"] | {"path": str(tmp_path / "segment")}
    spoilt = {name: value for name, value in good.items() if name != "channel"} | {"segment": segment}
    shutil.copyfile(good["segment"]["path"], segment["path"])
    spoil(spoilt)
    in_flight = generate(engine, 2, max_tokens=200)
    with pytest.raises(WeightSyncRejected):
        await engine.update_weights(spoilt)
    assert engine.version == before
    assert set((await in_flight).versions) == {before}
    await engine.update_weights(good)
    assert engine.version == before + 1


async def test_cancelling_frees_the_request(engine: Engine) -> None:
    requests = [generate(engine, number, max_tokens=380) for number in range(4)]
    await asyncio.sleep(0)
    assert (await engine.stats()).running == 4
    await asyncio.sleep(0.005)
    for request in requests:
        request.cancel()
    assert all(
        isinstance(end, asyncio.CancelledError) for end in await asyncio.gather(*requests, return_exceptions=True)
    )
    assert (await engine.stats()).running == 0
    assert (await generate(engine, 1, max_tokens=4)).token_ids


async def test_counters_grow_by_what_was_read_and_written(engine: Engine) -> None:
    before = await engine.stats()
    answer = await generate(engine, 5, max_tokens=10)
    after = await engine.stats()
    assert after.generated_tokens - before.generated_tokens == len(answer.token_ids)
    assert after.prompt_tokens - before.prompt_tokens == len(PROMPT) + 1
    assert (after.running, after.waiting) == (0, 0)


async def test_a_closed_engine_fails_what_is_in_flight_and_what_comes(
    engine: Engine, publish: Callable[[int], dict[str, Any]]
) -> None:
    """The last one: it closes the engine that the others share."""
    request = generate(engine, 2, max_tokens=380)
    await asyncio.sleep(0.005)
    await engine.close()
    await engine.close()
    ends = await asyncio.gather(
        request,
        generate(engine, 1, max_tokens=4),
        engine.token_logprobs(PROMPT),
        engine.update_weights(publish(engine.version + 1)),
        return_exceptions=True,
    )
    assert all(isinstance(end, EngineFailed) and "closed" in str(end) for end in ends), ends
