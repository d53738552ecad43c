"""What the scripted engine adds to the contract of engines: its script and its faults."""

import asyncio

import pytest

from rollout_workers.engines.fake import FakeEngine, Script
from rollout_workers.errors import EngineFailed

EOS = 9


async def say(
    engine: FakeEngine, prompt: tuple[int, ...], request_id: str = "r", max_tokens: int = 8
) -> tuple[int, ...]:
    answer = await engine.generate(prompt, request_id=request_id, max_tokens=max_tokens, temperature=1.0)
    return answer.token_ids


async def started(script: Script, **settings: object) -> FakeEngine:
    engine = FakeEngine(script, eos_id=EOS, **settings)  # type: ignore[arg-type]
    await engine.start()
    return engine


@pytest.mark.parametrize("script", [{(1, 2): (3, 4)}, {(1, 2): (3, 4, EOS)}, lambda prompt: [p + 2 for p in prompt]])
async def test_the_script_is_played_and_the_turn_ended(script: Script) -> None:
    assert await say(await started(script), (1, 2)) == (3, 4, EOS)


async def test_an_action_beyond_the_budget_is_cut() -> None:
    engine = await started({(1,): (3, 4, 5)})
    answer = await engine.generate((1,), request_id="r", max_tokens=2, temperature=1.0)
    assert (answer.token_ids, answer.finish_reason) == ((3, 4), "length")


async def test_a_prompt_that_the_script_does_not_know_fails() -> None:
    with pytest.raises(EngineFailed, match="no action"):
        await say(await started({(1,): (2,)}), (7,))


async def test_chosen_requests_are_refused_and_others_served() -> None:
    engine = await started({(1,): (2,)}, refuse=lambda request_id: request_id.endswith("#3"))
    with pytest.raises(EngineFailed, match="math#3"):
        await say(engine, (1,), "math#3")
    assert await say(engine, (1,), "math#4") == (2, EOS)


async def test_death_fails_what_is_in_flight_at_once() -> None:
    engine = await started({(1,): range(8)}, token_s=3600.0)
    request = asyncio.create_task(say(engine, (1,)))
    await asyncio.sleep(0)
    engine.die()
    with pytest.raises(EngineFailed, match="process ended"):
        await request
    with pytest.raises(EngineFailed, match="process ended"):
        await say(engine, (1,))


async def test_nothing_is_served_before_the_start() -> None:
    with pytest.raises(EngineFailed, match="not started"):
        await say(FakeEngine({(1,): (2,)}, eos_id=EOS), (1,))
