"""What a command in a sandbox cannot do, and what a lease cannot leave behind. Docker only."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import pytest_asyncio

from sandboxes.client import AgentConnection, AgentSandbox
from sandboxes.config import SandboxConfig
from sandboxes.errors import FilesRefused, SandboxLost
from sandboxes.pool import LocalProvider, SandboxHost

pytestmark = [pytest.mark.integration, pytest.mark.asyncio(loop_scope="module")]
CONFIG = SandboxConfig(pool_size=1, memory_mb=96, disk_mb=16, pids=32, command_timeout_s=20)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def host(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SandboxHost]:
    host = SandboxHost(CONFIG, f"isolation-{os.getpid()}", tmp_path_factory.mktemp("s"))
    await host.start()
    try:
        yield host
    finally:
        stats = await host.stats()
        await host.close()
    # One container served every test in this file: each reset was clean, no attack killed the agent.
    assert (stats.created, stats.lost) == (1, 0)


@asynccontextmanager
async def leased(host: SandboxHost) -> AsyncIterator[AgentSandbox]:
    provider = LocalProvider(host)
    sandbox = await provider.acquire(timeout_s=60)
    assert isinstance(sandbox, AgentSandbox)
    try:
        yield sandbox
    finally:
        await provider.release(sandbox)


@pytest_asyncio.fixture(loop_scope="module")
async def sandbox(host: SandboxHost) -> AsyncIterator[AgentSandbox]:
    async with leased(host) as sandbox:
        yield sandbox


async def processes(sandbox: AgentSandbox) -> list[str]:
    """Command lines of all processes but the agent and the one that asks."""
    result = await sandbox.exec("exec ps -e -o pid=,args=")
    lines = [line.split(None, 1)[1].strip() for line in result.stdout.decode().splitlines()]
    return [line for line in lines if "-m agent" not in line and not line.startswith("ps ")]


async def test_identity_and_privileges(sandbox: AgentSandbox) -> None:
    result = await sandbox.exec("id -u; id -g; id -G; grep -E 'CapEff|CapPrm|NoNewPrivs' /proc/self/status; umask")
    assert (
        result.stdout.split()
        == b"1000 1000 1000 CapPrm: 0000000000000000 CapEff: 0000000000000000 NoNewPrivs: 1 0022".split()
    )
    real = await sandbox.exec("grep -E '^(Uid|Gid)' /proc/self/status")
    assert real.stdout.split() == b"Uid: 1000 1000 1000 1000 Gid: 1000 1000 1000 1000".split()


async def test_no_descriptor_of_the_agent_is_inherited(sandbox: AgentSandbox) -> None:
    listing = "python3 -c 'import os; print(*sorted(os.listdir(\"/proc/self/fd\")))'"
    assert (await sandbox.exec(listing)).stdout == b"0 1 2 3\n", "3 is the listing itself"


async def test_the_agent_is_out_of_reach(sandbox: AgentSandbox) -> None:
    for attempt in (
        "ls /crosstrain",
        "ls /crosstrain/socket",
        "cat /proc/1/environ",
        "ls /proc/1/fd",
        "readlink /proc/1/root",
    ):
        assert (await sandbox.exec(attempt)).exit_code != 0, attempt
    signals = "INT TERM ALRM HUP USR1 STOP KILL PIPE"
    await sandbox.exec(f"for i in $(seq 300); do for s in {signals}; do kill -$s 1; done; done 2> /dev/null &")
    for _ in range(20):
        assert (await sandbox.exec("echo alive")).stdout == b"alive\n"


async def test_all_but_the_writable_directories_is_read_only(sandbox: AgentSandbox) -> None:
    result = await sandbox.exec(
        "for d in / /etc /usr /var /var/tmp /root /home /run /dev /opt; do touch $d/x && echo $d; done"
    )
    assert result.stdout == b""
    assert (
        await sandbox.exec("touch /work/x /tmp/x /dev/shm/x && echo '#!/bin/sh' > y && chmod +x y && ./y")
    ).exit_code == 0


async def test_there_is_no_network(sandbox: AgentSandbox) -> None:
    assert (await sandbox.exec("cat /proc/net/dev | tail -n +3 | cut -d: -f1 | xargs")).stdout == b"lo\n"
    connect = "import socket; socket.create_connection(('1.1.1.1', 53), timeout=3)"
    result = await sandbox.exec(f'python3 -c "{connect}"')
    assert result.exit_code == 1 and b"unreachable" in result.stderr


async def test_memory_bomb_ends_itself_alone(sandbox: AgentSandbox) -> None:
    result = await sandbox.exec("python3 -c 'x = bytearray(200 << 20); print(len(x))'")
    assert result.exit_code == 137 and result.stdout == b""
    assert (await sandbox.exec("echo alive")).stdout == b"alive\n"


async def test_fork_bomb_ends_at_the_deadline(sandbox: AgentSandbox) -> None:
    result = await sandbox.exec("bomb() { bomb | bomb & }; bomb; sleep 30", timeout_s=1)
    assert result.timed_out
    assert await processes(sandbox) == []


async def test_fork_bomb_in_the_background_ends_with_the_lease(host: SandboxHost) -> None:
    async with leased(host) as sandbox:
        await sandbox.exec("bomb() { bomb | bomb & }; bomb 2> /dev/null")
        starved = await sandbox.exec("sleep 0.1 && echo ran")
        assert not starved.timed_out, "it runs or cannot start, but does not hang"
    async with leased(host) as sandbox:
        assert await processes(sandbox) == []


@pytest.mark.parametrize("directory", ["/work", "/tmp", "/dev/shm"])
async def test_full_disk(sandbox: AgentSandbox, directory: str) -> None:
    result = await sandbox.exec(f"head -c 100M /dev/zero > {directory}/big; stat -c %s {directory}/big")
    assert b"No space left" in result.stderr
    assert int(result.stdout) <= 16 << 20
    if directory == "/work":
        with pytest.raises(FilesRefused, match="No space left"):
            await sandbox.write_files({"one/more": b"x" * 4096})
        assert [len(data) for name, data in (await sandbox.read_files()).items() if name == "big"] == [
            int(result.stdout)
        ]


async def test_full_of_tiny_files(sandbox: AgentSandbox) -> None:
    script = "import os\nfor n in range(10**6): os.close(os.open(f't{n}', os.O_CREAT))"
    result = await sandbox.exec(f'python3 -c "{script}"')
    assert result.exit_code == 1 and b"No space left" in result.stderr


async def test_deadline_reaches_those_who_left_the_session(sandbox: AgentSandbox) -> None:
    hiding = "(setsid sleep 1001 &) ; setsid setsid sleep 1002 & nohup sleep 1003 & trap '' TERM HUP INT; sleep 1004"
    result = await sandbox.exec(hiding, timeout_s=1)
    assert result.timed_out
    assert await processes(sandbox) == []


async def test_orphans_are_reaped(sandbox: AgentSandbox) -> None:
    await sandbox.exec("for i in $(seq 60); do (sh -c 'sleep 0.01 &' ); done; sleep 0.2")  # more than `pids`
    assert await processes(sandbox) == []


async def test_links_lead_nowhere_the_user_cannot_go(sandbox: AgentSandbox) -> None:
    await sandbox.exec("ln -s /etc up; ln -s /crosstrain/socket trap")
    with pytest.raises(FilesRefused, match="passwd"):
        await sandbox.write_files({"up/passwd": b"root::0:0::/:/bin/sh"})
    with pytest.raises(FilesRefused, match="trap"):
        await sandbox.write_files({"trap/agent.sock": b""})
    assert await sandbox.read_files("up") == {}


async def test_reset_leaves_nothing(host: SandboxHost) -> None:
    deep = "import os\nos.chdir('/tmp')\nfor n in range(3000): os.mkdir('d'); os.chdir('d')"
    async with leased(host) as sandbox:
        await sandbox.exec(
            "echo x > /work/.hidden; echo x > /tmp/x; echo x > /dev/shm/x; mkdir -p /work/a/b; chmod 0 /work/a /work;"
            "setsid sleep 2001 & (sleep 2002 &)"
        )
        assert (await sandbox.exec(f'python3 -c "{deep}"', cwd="/")).exit_code == 0
    async with leased(host) as sandbox:
        found = await sandbox.exec("find /work /tmp /dev/shm /dev/mqueue -mindepth 1; stat -c %a /work /tmp")
        assert found.stdout == b"755\n755\n"
        assert await processes(sandbox) == []


async def test_a_stale_holder_is_refused(host: SandboxHost) -> None:
    async with leased(host) as first:
        stale = await AgentSandbox.connect(first.lease)
    async with leased(host) as second:
        assert second.lease.container == first.lease.container
        with pytest.raises(SandboxLost, match="lease"):
            await stale.exec("touch from-beyond")
        assert await second.read_files() == {}
    await stale.close()


async def test_noise_on_the_socket_harms_nobody(sandbox: AgentSandbox) -> None:
    for noise in (b"", b"\0\0", b"\xff\xff\xff\xff", b"\0\0\0\x02{}", b"\0\0\0\x04null", b"\0\0\0\x0bnot JSON!!!"):
        _, writer = await asyncio.open_unix_connection(sandbox.lease.socket_path)
        writer.write(noise)
        writer.close()
        await writer.wait_closed()
    unknown = AgentConnection(sandbox.lease.socket_path, sandbox.lease.container)
    with pytest.raises(SandboxLost):
        await unknown.request({"op": "explode", "lease": sandbox.lease.id}, timeout_s=5)
    assert (await sandbox.exec("echo alive")).stdout == b"alive\n"


async def test_a_python_program_keeps_nothing_of_the_agent(sandbox: AgentSandbox) -> None:
    program = """
import os, signal, sys
status = open("/proc/thread-self/status").read()
print(*(line.split(":")[1].split()[0] for line in status.splitlines() if line.startswith(("CapEff", "CapPrm"))))
print(os.getresuid(), os.getresgid(), os.getgroups(), os.getpid() == os.getsid(0))
open_now = []
for fd in range(256):
    try:
        os.fstat(fd)
        open_now.append(fd)
    except OSError:
        pass
print(open_now, signal.set_wakeup_fd(-1), signal.getsignal(signal.SIGCHLD) is signal.SIG_DFL)
print(sorted(os.environ), os.getcwd(), sys.argv)
for attempt in (lambda: os.setuid(0), lambda: os.kill(1, 9), lambda: os.listdir("/crosstrain")):
    try:
        attempt()
        print("allowed")
    except PermissionError:
        print("refused")
"""
    result = await sandbox.python(program)
    assert result.stdout.decode().splitlines() == [
        "0000000000000000 0000000000000000",
        "(1000, 1000, 1000) (1000, 1000, 1000) [] True",
        "[0, 1, 2] -1 True",
        "['HOME', 'LANG', 'PATH', 'TERM', 'USER'] /work ['-c']",
        *["refused"] * 3,
    ], result.stderr
    assert (await sandbox.exec("echo alive")).stdout == b"alive\n"
