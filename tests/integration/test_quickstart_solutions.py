"""Every task of the quickstart in its real environment: the reference solution passes, doing nothing does not."""

from pathlib import Path

import pytest

from orchestrator.validate import validate

DOMAINS = Path(__file__).parents[2] / "examples" / "quickstart" / "domains"


@pytest.mark.integration
@pytest.mark.parametrize("domain", ["terminal", "code", "math", "tools"])
async def test_solutions_pass_and_idling_does_not(domain: str) -> None:
    validation = await validate(DOMAINS / domain)
    assert validation.sound, validation.problems
    assert validation.played == validation.tasks
