"""One answer through a verifier, as whole episodes; and environments by name."""

import json
from pathlib import Path

import pytest

from reward.config import DomainConfig
from reward.domain import Domain, load_domain
from reward.errors import DomainError
from reward.score import Score, Status
from reward.task import Task
from reward.verifiers.pool import VerifierPool
from rollout_workers.chat import ByteChat
from rollout_workers.engines.fake import FakeEngine
from rollout_workers.environment import EnvironmentContext
from rollout_workers.environments.registry import build_environment
from rollout_workers.episode import run_episode
from sandboxes.fake import FakeProvider

TOML = """
name = "echo"
environment = "single_turn"
verifier = "check.py:verify"
max_tokens = 12
verifier_timeout_s = 5

[components.success]
range = [0, 1]
"""
VERIFIER = """
import os
from reward.errors import UnparsableAnswer

def verify(task, answer):
    if answer == "crash":
        os._exit(1)
    if answer == "?":
        raise UnparsableAnswer("no answer in it")
    return {"success": float("nan") if answer == "nan" else float(answer == task["data"]["expected"])}
"""


def row(name: str) -> str:
    return json.dumps({"id": name, "prompt": f"say {name}:", "data": {"expected": name}, "solution": [name]}) + "\n"


@pytest.fixture
def domain(tmp_path: Path) -> Domain:
    (tmp_path / "domain.toml").write_text(TOML)
    (tmp_path / "check.py").write_text(VERIFIER)
    (tmp_path / "train.jsonl").write_text(row("yes"))
    (tmp_path / "eval.jsonl").write_text(row("no"))
    return load_domain(tmp_path)


async def answered(domain: Domain, answer: str) -> Score:
    """The score of an episode whose only message is `answer`."""
    chat = ByteChat()
    engine = FakeEngine(lambda prompt: chat.message_ids(answer), eos_id=chat.eos_id)
    await engine.start()
    verifiers = VerifierPool(1)
    try:
        episode = await run_episode(
            domain.train[0],
            episode_id="echo/yes#0.0",
            context=EnvironmentContext(domain, FakeProvider(), verifiers),
            engine=engine,
            chat=chat,
            max_model_len=64,
            temperature=1.0,
            seed=None,
        )
    finally:
        await verifiers.close()
        await engine.close()
    assert len(episode.turns) == 1
    return episode.score


@pytest.mark.parametrize(
    ("answer", "status", "passed"),
    [
        ("yes", Status.OK, True),
        ("no", Status.OK, False),
        ("?", Status.POLICY_FAILURE, False),
        ("yes" * 9, Status.TRUNCATED, False),
        ("crash", Status.INFRA_ERROR, False),
        ("nan", Status.INFRA_ERROR, False),
    ],
)
async def test_what_the_verifier_does_decides_the_status(domain, answer, status, passed):
    score = await answered(domain, answer)
    assert (score.status, score.passed) == (status, passed)
    if status is Status.INFRA_ERROR:
        assert score.total != 0.0, "a failed verifier is no bad answer"
        assert score.components == {}
    else:
        assert score.total == float(passed)


async def test_an_unparsable_answer_says_why(domain):
    assert (await answered(domain, "?")).detail == "no answer in it"


def test_an_environment_that_does_not_exist_is_named(domain):
    config = DomainConfig.model_validate(
        {"name": "x", "environment": "termnal", "components": {"success": {"range": [0, 1]}}}
    )
    unknown = Domain(config, domain.folder, "0", (), ())
    with pytest.raises(DomainError, match="environment = 'termnal' is neither built in"):
        build_environment(EnvironmentContext(unknown, FakeProvider(), VerifierPool(1)))


def test_tasks_keep_what_only_the_verifier_reads(domain):
    assert domain.eval == (Task("no", "echo", "eval", "say no:", {"expected": "no"}, ("no",)),)
