"""One suite for the built-in environments, over fake sandboxes and over Docker's."""

import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from reward.config import DomainConfig
from reward.domain import Domain
from reward.task import Task
from reward.verifiers.pool import VerifierPool
from rollout_workers.environment import Environment, EnvironmentContext
from rollout_workers.environments.registry import build_environment
from rollout_workers.errors import PolicyFailed
from sandboxes.base import Sandbox, SandboxProvider
from sandboxes.config import SandboxConfig
from sandboxes.fake import FakeProvider
from sandboxes.latency import Latencies
from sandboxes.pool import LocalProvider, SandboxHost

pytestmark = [pytest.mark.contract, pytest.mark.asyncio(loop_scope="module")]


class Counting:
    """A provider that counts leases: environments have to give back what they took."""

    def __init__(self, inner: SandboxProvider) -> None:
        self._inner = inner
        self.acquired = 0
        self.open: list[Sandbox] = []

    @property
    def latencies(self) -> Latencies:
        return self._inner.latencies

    async def acquire(self, *, timeout_s: float | None = None) -> Sandbox:
        sandbox = await self._inner.acquire(timeout_s=timeout_s)
        self.acquired += 1
        self.open.append(sandbox)
        return sandbox

    async def release(self, sandbox: Sandbox) -> None:
        self.open.remove(sandbox)
        await self._inner.release(sandbox)


@pytest_asyncio.fixture(
    scope="module", loop_scope="module", params=["fake", pytest.param("docker", marks=pytest.mark.integration)]
)
async def inner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Any]:
    if request.param == "fake":
        yield FakeProvider()
        return
    root = tmp_path_factory.getbasetemp() / secrets.token_hex(2)
    host = SandboxHost(SandboxConfig(pool_size=2), f"test-{secrets.token_hex(4)}", root)
    await host.start()
    try:
        yield LocalProvider(host)
    finally:
        await host.close()


@dataclass
class Play:
    """An environment in a test's hands."""

    provider: Counting
    folder: Path

    async def start(self, environment: str, data: dict[str, Any], prompt: str = "do it", **keys: Any) -> Environment:
        components = {"terminal": {"success": {"range": [0, 1]}, "steps": {"range": [0, 9], "kind": "cost"}}}
        default = {"tests_passed": {"range": [0, "tests"]}}
        config = DomainConfig.model_validate(
            {
                "name": "demo",
                "environment": environment,
                "max_turns": 9,
                "components": components.get(environment, default),
                **keys,
            }
        )
        context = EnvironmentContext(Domain(config, self.folder, "0", (), ()), self.provider, VerifierPool(1))
        built = build_environment(context)
        assert (await built.reset(Task("t", "demo", "train", prompt, data))).text == prompt
        return built

    async def finish(self, environment: Environment) -> dict[str, float]:
        try:
            return dict(await environment.grade())
        finally:
            await environment.close()
            assert not self.provider.open, "every sandbox is given back"


@pytest.fixture
def play(inner: SandboxProvider, tmp_path: Path) -> Play:
    return Play(Counting(inner), tmp_path)


# Terminal.

TASK = {"files": {"notes/a.txt": "alpha\n"}, "expect": {"b.txt": "alpha\n", "notes/a.txt": None}}


async def test_commands_change_files_and_are_graded_by_them(play: Play) -> None:
    shell = await play.start("terminal", TASK)
    assert (await shell.step("ls notes; cat notes/a.txt")).text == "a.txt\nalpha\n"
    assert (await shell.step("mv notes/a.txt b.txt")).text == ""
    assert (await shell.step("exit")).done
    assert await play.finish(shell) == {"success": 1.0, "steps": 3.0}
    assert play.provider.acquired == 1


@pytest.mark.parametrize("command", ["cp notes/a.txt b.txt", "rm notes/a.txt", "rm notes/a.txt; echo beta > b.txt"])
async def test_files_that_differ_are_no_success(play: Play, command: str) -> None:
    shell = await play.start("terminal", TASK)
    await shell.step(command)
    assert await play.finish(shell) == {"success": 0.0, "steps": 1.0}


async def test_final_newlines_are_not_compared(play: Play) -> None:
    shell = await play.start("terminal", TASK)
    await shell.step("rm notes/a.txt; printf alpha > b.txt")
    assert (await play.finish(shell))["success"] == 1.0


@pytest.mark.parametrize("message", ["exit", "", " exit\n", "\n"])
async def test_ending_at_once_takes_no_sandbox_and_changes_nothing(play: Play, message: str) -> None:
    shell = await play.start("terminal", TASK)
    assert (await shell.step(message)).done
    assert await play.finish(shell) == {"success": 0.0, "steps": 1.0}
    assert play.provider.acquired == 0


async def test_only_declared_components_are_returned(play: Play) -> None:
    shell = await play.start("terminal", TASK, components={"success": {"range": [0, 1]}})
    await shell.step("exit")
    assert await play.finish(shell) == {"success": 0.0}


async def test_the_working_directory_is_kept_between_commands(play: Play) -> None:
    shell = await play.start("terminal", TASK)
    assert (await shell.step("cd notes && ls")).text == "a.txt\n"
    assert (await shell.step("mkdir 'x  y'; cd 'x  y'; pwd | tail -c 11")).text == "notes/x  y\n"
    assert (await shell.step("ls ..; (exit 3)")).text == "a.txt\nx  y\n[exit 3]"
    assert (await shell.step('basename "$PWD"; cd ../..; rm -r notes/x*; cd notes')).text == "x  y\n"
    assert (await shell.step("ls")).text == "a.txt\n"
    await play.finish(shell)


async def test_a_removed_working_directory_falls_back_to_the_first(play: Play) -> None:
    shell = await play.start("terminal", TASK)
    await shell.step("mkdir d; cd d; rmdir ../d")
    text = (await shell.step("ls")).text
    assert "d: No such file or directory" in text
    assert text.endswith("\nnotes\n")
    await play.finish(shell)


async def test_errors_and_exit_codes_are_shown_in_order(play: Play) -> None:
    shell = await play.start("terminal", TASK)
    text = (await shell.step("echo one; cat gone; echo two; false")).text
    assert text == "one\ncat: gone: No such file or directory\ntwo\n[exit 1]"
    text = (await shell.step("echo 'unfinished")).text
    assert "unexpected EOF" in text
    assert text.endswith("[exit 2]")
    assert (await shell.step("exec echo replaced")).text == "replaced\n"
    assert (await shell.step("kill -9 $$")).text == "[exit 137]"
    await play.finish(shell)


async def test_long_output_is_cut_in_the_middle(play: Play) -> None:
    shell = await play.start("terminal", {**TASK, "output_chars": 20})
    assert (await shell.step("seq 1000")).text == "1\n2\n3\n4\n5\n\n...\n\n999\n1000\n"
    assert "\ufffd" in (await shell.step(r"printf '\377'")).text
    await play.finish(shell)


async def test_a_command_that_overruns_its_deadline_is_shown_as_such(play: Play) -> None:
    shell = await play.start("terminal", TASK)
    text = (await shell.step("echo begun; sleep 60")).text
    assert text.startswith("begun\n")
    assert "[timed out]" in text
    assert (await shell.step("echo alive")).text == "alive\n"
    await play.finish(shell)


async def test_a_zero_byte_is_the_policys_failure(play: Play) -> None:
    shell = await play.start("terminal", TASK)
    with pytest.raises(PolicyFailed, match="zero byte"):
        await shell.step("echo a\0b")
    assert (await play.finish(shell))["success"] == 0.0


# Code.

ADD = {"entry_point": "add", "tests": [[[1, 2], 3], [[-1, 1], 0], [["a", "b"], "ab"], [[[1], [2]], [1, 2]]]}


async def passed(play: Play, program: str, data: dict[str, Any] = ADD, **keys: Any) -> float:
    code = await play.start("code", data, **keys)
    assert (await code.step(program)).done
    return (await play.finish(code))["tests_passed"]


async def test_a_right_program_passes_every_test_with_one_lease(play: Play) -> None:
    assert await passed(play, "def add(a, b):\n    return a + b\n") == 4
    assert play.provider.acquired == 1


async def test_the_prompt_may_be_the_programs_beginning(play: Play) -> None:
    data = {**ADD, "include_prompt": True}
    assert await passed(play, " a + b", data, prompt="def add(a, b):\n    return") == 4


async def test_a_fenced_program_is_taken_out_of_the_text(play: Play) -> None:
    assert await passed(play, "Here it is:\n```python\ndef add(a, b):\n    return a + b\n```\nDone.") == 4


@pytest.mark.parametrize(
    ("program", "count"),
    [
        ("def add(a, b):\n    if a == -1: raise ValueError\n    return a + b", 3),
        ("def add(a, b):\n    if a == -1:\n        while True: pass\n    return a + b", 3),
        ("import sys\ndef add(a, b):\n    if a == -1: sys.exit()\n    return a + b", 3),
        ("import os\ndef add(a, b):\n    if a == -1: os._exit(0)\n    return a + b", 3),
        ("import os\ndef add(a, b):\n    if a == -1: os.kill(os.getpid(), 9)\n    return a + b", 3),
        ("def add(a, b):\n    if a == -1: return {1, 2}\n    return a + b", 3),
        ("def add(a, b):\n    if a == -1: print('0'); return\n    return a + b", 3),
        ("def add(a, b, seen=[]):\n    seen.append(a)\n    return a + b if len(seen) == 1 else None", 4),
        ("def add(a, b):\n    return 3", 1),
        ("def subtract(a, b):\n    return a - b", 0),
        ("raise SystemExit", 0),
        ("def add(a, b):\n    return add(a, b)", 0),
        ("class Any:\n    def __eq__(self, other): return True\ndef add(a, b):\n    return Any()", 0),
        ("print('ok')\nprint('3')\ndef add(a, b): return None", 0),
        (
            "import os\nfor fd in range(3, 64):\n    try: os.write(fd, b'forged\\n')\n    except OSError: pass\n"
            "def add(a, b): ...",
            0,
        ),
    ],
)
async def test_each_test_stands_alone(play: Play, program: str, count: int) -> None:
    assert await passed(play, program) == count


async def test_numbers_compare_as_python_compares_them(play: Play) -> None:
    data = {
        "entry_point": "f",
        "tests": [
            [[0], 0.3],
            [[1], 2],
            [[2], True],
            [[3], {"a": [1, None]}],
            [[4], [1, 2]],
            [[5], 10**30],
            [[6], "é\n"],
        ],
    }
    program = "def f(i): return [0.1 + 0.2, 2.0, 1, {'a': (1.0, None)}, (1, 2), 10**30, 'é\\n'][i]"
    assert await passed(play, program, data) == 7


@pytest.mark.parametrize("program", ["def add(a, b:\n", "return 1", "x = 1\n  y = 2", "\0", "(" * 1000])
async def test_a_program_that_does_not_compile_is_the_policys_failure(play: Play, program: str) -> None:
    code = await play.start("code", ADD)
    with pytest.raises(PolicyFailed, match="does not compile"):
        await code.step(program)
    assert await play.finish(code) == {"tests_passed": 0.0}


async def test_no_program_at_all_passes_nothing(play: Play) -> None:
    code = await play.start("code", ADD)
    assert await play.finish(code) == {"tests_passed": 0.0}
    assert play.provider.acquired == 0


async def test_many_tests_fit_into_one_answer(play: Play) -> None:
    data = {"entry_point": "f", "tests": [[[i], "x" * i] for i in range(256)], "timeout_s": 5.0}
    assert await passed(play, "def f(n): return 'x' * n", data) == 256
