"""What every sandbox and provider promises, over the fake and over Docker."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from sandboxes.base import Sandbox, SandboxProvider
from sandboxes.config import SandboxConfig
from sandboxes.errors import FilesRefused, NoCapacity, SandboxLost
from sandboxes.fake import FakeProvider
from sandboxes.pool import LocalProvider, SandboxHost

pytestmark = [pytest.mark.contract, pytest.mark.asyncio(loop_scope="module")]
CONFIG = SandboxConfig(pool_size=2, output_bytes=1000, command_timeout_s=20)


@pytest_asyncio.fixture(
    scope="module", loop_scope="module", params=["fake", pytest.param("docker", marks=pytest.mark.integration)]
)
async def provider(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[SandboxProvider]:
    if request.param == "fake":
        yield FakeProvider(CONFIG)
        return
    host = SandboxHost(CONFIG, f"contract-{os.getpid()}", tmp_path_factory.mktemp("s"))
    await host.start()
    try:
        yield LocalProvider(host)
    finally:
        await host.close()


@pytest_asyncio.fixture(loop_scope="module")
async def sandbox(provider: SandboxProvider) -> AsyncIterator[Sandbox]:
    leased = await provider.acquire(timeout_s=60)
    try:
        yield leased
    finally:
        await provider.release(leased)


async def test_streams_and_exit_status(sandbox: Sandbox) -> None:
    result = await sandbox.exec("echo out; echo err >&2; exit 3")
    assert (result.exit_code, result.stdout, result.stderr) == (3, b"out\n", b"err\n")
    assert not result.timed_out and not result.truncated and result.duration_s > 0


@pytest.mark.parametrize(("number", "code"), [(9, 137), (15, 143)])
async def test_a_signal_is_128_plus_its_number(sandbox: Sandbox, number: int, code: int) -> None:
    assert (await sandbox.exec(f"kill -{number} $$")).exit_code == code


async def test_standard_input(sandbox: Sandbox) -> None:
    data = os.urandom(1 << 20)
    result = await sandbox.exec("wc -c; cat > /dev/null", stdin=data)
    assert result.stdout.split() == [str(len(data)).encode()]
    assert (await sandbox.exec("cat", stdin=b"\0\xff binary")).stdout == b"\0\xff binary"
    assert (await sandbox.exec("true", stdin=data)).exit_code == 0, "a command need not read its input"
    assert (await sandbox.exec("cat")).stdout == b"", "without input there is an end of file"


async def test_directory_and_environment(sandbox: Sandbox) -> None:
    await sandbox.write_files({"deep/er/file": b"x"})
    assert (await sandbox.exec("ls", cwd="deep/er")).stdout == b"file\n"
    assert (await sandbox.exec("ls", cwd="/work/deep")).stdout == b"er\n"
    assert (await sandbox.exec('echo "$A$HIDDEN"', env={"A": "é b"})).stdout == "é b\n".encode()
    assert (await sandbox.exec("echo never", cwd="missing")).exit_code == 126


async def test_what_cannot_be_run_is_a_failed_command(sandbox: Sandbox) -> None:
    assert (await sandbox.exec("echo \0")).exit_code == 126
    assert (await sandbox.exec("no-such-program")).exit_code == 127
    assert (await sandbox.exec("true")).exit_code == 0


async def test_output_keeps_head_and_tail(sandbox: Sandbox) -> None:
    result = await sandbox.exec("seq 1 100000; echo short >&2")
    whole = "".join(f"{n}\n" for n in range(1, 100001)).encode()
    half = CONFIG.output_bytes // 2
    assert result.truncated and result.stderr == b"short\n"
    assert result.stdout.startswith(whole[:half]) and result.stdout.endswith(whole[-half:])
    assert f"[... {len(whole) - 2 * half} bytes left out ...]".encode() in result.stdout
    assert len(result.stdout) < CONFIG.output_bytes + 60


async def test_output_at_the_bound_is_whole(sandbox: Sandbox) -> None:
    result = await sandbox.exec(f"head -c {CONFIG.output_bytes} /dev/zero")
    assert result.stdout == bytes(CONFIG.output_bytes) and not result.truncated


async def test_deadline(sandbox: Sandbox) -> None:
    result = await sandbox.exec("echo begun; sleep 60 & sleep 60", timeout_s=0.5)
    assert result.timed_out and result.exit_code == 137 and result.stdout == b"begun\n"
    assert result.duration_s >= 0.5
    assert (await sandbox.exec("echo usable", timeout_s=1e9)).stdout == b"usable\n"


async def test_background_process_holds_nothing_up_and_lives_on(sandbox: Sandbox) -> None:
    result = await sandbox.exec("(while sleep 0.05; do echo noise; echo x >> ticks; done) & echo done")
    assert result.stdout.startswith(b"done\n") and not result.timed_out
    # Its output pipe has no reader any more but for the sandbox: it must neither die of that nor block.
    waiting = "for i in $(seq 200); do [ $(wc -l < ticks) -gt 5 ] && exit 0; sleep 0.05; done; exit 1"
    assert (await sandbox.exec("touch ticks; " + waiting)).exit_code == 0


async def test_files_go_in_and_out(sandbox: Sandbox) -> None:
    files = {"a": b"", "dir/b.bin": bytes(range(256)) * 1000, "name with\nnewline": b"1", "caf\udce9": b"not UTF-8"}
    await sandbox.write_files(files)
    assert await sandbox.read_files() == files
    assert await sandbox.read_files("dir") == {"b.bin": files["dir/b.bin"]}
    assert await sandbox.read_files("/work/dir") == {"b.bin": files["dir/b.bin"]}
    assert await sandbox.read_files("nowhere") == {}
    assert await sandbox.read_files("a") == {}


async def test_writing_replaces(sandbox: Sandbox) -> None:
    await sandbox.exec("echo old > target; ln -s target link; echo old > readonly; chmod 0400 readonly")
    await sandbox.write_files({"link": b"new", "readonly": b"new"})
    assert await sandbox.read_files() == {"target": b"old\n", "link": b"new", "readonly": b"new"}
    assert (await sandbox.exec("echo more >> readonly")).exit_code == 0, "the sandbox user owns what is written"


async def test_only_regular_files_are_read(sandbox: Sandbox) -> None:
    await sandbox.exec("mkdir d; echo x > d/x; ln -s d linked; ln -s /etc/passwd p; ln -s gone broken; mkfifo pipe")
    assert await sandbox.read_files() == {"d/x": b"x\n"}


async def test_refused_files_leave_the_sandbox_usable(sandbox: Sandbox) -> None:
    await sandbox.exec("mkdir taken")
    with pytest.raises(FilesRefused, match="taken"):
        await sandbox.write_files({"taken": b"x"})
    await sandbox.exec("truncate -s 10G sparse")
    with pytest.raises(FilesRefused, match="larger than"):
        await sandbox.read_files()
    await sandbox.exec("rm sparse")
    assert await sandbox.read_files() == {}


async def test_cancelled_command_ends_and_the_sandbox_goes_on(sandbox: Sandbox) -> None:
    task = asyncio.ensure_future(sandbox.exec("sleep 0.3; touch late; sleep 60", timeout_s=60))
    await asyncio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await sandbox.exec("sleep 0.5; ls")).stdout == b""


async def test_commands_at_the_same_time_do_not_mix(sandbox: Sandbox) -> None:
    results = await asyncio.gather(*(sandbox.exec(f"echo {n}; sleep 0.05; echo {n}") for n in range(5)))
    assert [result.stdout for result in results] == [f"{n}\n{n}\n".encode() for n in range(5)]


async def test_latencies_count_commands_and_no_programs_of_ours(provider: SandboxProvider, sandbox: Sandbox) -> None:
    before = provider.latencies.count
    await sandbox.exec("sleep 0.1")
    await sandbox.python("pass")
    assert provider.latencies.count == before + 1
    assert provider.latencies.quantile_ms(1.0) >= 98


async def test_a_lease_is_clean_exclusive_and_over_when_released(provider: SandboxProvider) -> None:
    first = await provider.acquire(timeout_s=60)
    second = await provider.acquire(timeout_s=60)
    await first.write_files({"secret": b"x"})
    with pytest.raises(NoCapacity):
        await provider.acquire(timeout_s=0.2)
    waiter = asyncio.ensure_future(provider.acquire(timeout_s=60))
    await asyncio.sleep(0.05)
    await provider.release(first)
    await provider.release(first)  # once more is no error
    third = await waiter
    try:
        assert third.id not in (first.id, second.id)
        assert await third.read_files() == {}
        with pytest.raises(SandboxLost):
            await first.exec("echo from beyond")
    finally:
        await provider.release(second)
        await provider.release(third)


async def test_nothing_is_left_of_a_lease(provider: SandboxProvider, tmp_path: Path) -> None:
    for _ in range(2 * CONFIG.pool_size):
        sandbox = await provider.acquire(timeout_s=60)
        try:
            assert await sandbox.read_files() == {}
            await sandbox.exec("mkdir -p a/b; echo x > a/b/c; chmod 000 a/b a")
        finally:
            await provider.release(sandbox)


async def test_python_runs_a_program_with_input_and_exit_status(sandbox: Sandbox) -> None:
    program = "import os, sys; print(os.getcwd(), sys.stdin.read(), __name__); sys.stderr.write('é'); sys.exit(7)"
    result = await sandbox.python(program, stdin=b"given")
    assert (result.exit_code, result.stderr) == (7, "é".encode())
    assert result.stdout.endswith(b" given __main__\n")
    assert (await sandbox.python("print(1)")).exit_code == 0
    assert (await sandbox.python("sys.exit()")).exit_code == 1, "names of an earlier program are gone"
    failed = await sandbox.python("1 / 0")
    assert failed.exit_code == 1 and b"ZeroDivisionError" in failed.stderr
    assert (await sandbox.python("not Python")).exit_code != 0
    assert (await sandbox.exec("echo still there")).stdout == b"still there\n"


async def test_python_is_ended_with_its_children_at_the_deadline(sandbox: Sandbox) -> None:
    program = "import os, time; os.fork() or os.setsid(); time.sleep(60)"
    result = await sandbox.python(program, timeout_s=0.5)
    assert result.timed_out
    assert (await sandbox.python("print('usable')")).stdout == b"usable\n"
