"""How the client takes an agent that misbehaves. The agent is a few lines on a real socket."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from sandboxes.agent.wire import encode
from sandboxes.client import AgentConnection, AgentSandbox, Lease
from sandboxes.errors import FilesRefused, SandboxLost

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def agent(path: Path, handler: Handler) -> AsyncIterator[AgentConnection]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await handler(reader, writer)
        finally:
            writer.close()

    server = await asyncio.start_unix_server(serve, path / "s")
    connection = AgentConnection(str(path / "s"), "box-1")
    try:
        yield connection
    finally:
        connection.end()
        server.close()
        await server.wait_closed()


def answering(data: bytes) -> Handler:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()

    return handler


async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read(1)


@pytest.mark.parametrize(
    "data",
    [
        b"\0\0\0\x05noise",
        b"\xff\xff\xff\xff",
        b"\0\0\0\x02{}",
        b"\0\0\0\x02[]",
        encode({"error": "lease"}),
        encode({"error": "what?"}),
    ],
)
async def test_broken_protocol_is_a_lost_sandbox(tmp_path: Path, data: bytes) -> None:
    async with agent(tmp_path, answering(data)) as connection:
        with pytest.raises(SandboxLost, match="box-1"):
            await connection.request({"op": "x"}, timeout_s=5)


async def test_closed_socket_is_a_lost_sandbox(tmp_path: Path) -> None:
    async with agent(tmp_path, hang_up) as connection:
        with pytest.raises(SandboxLost, match="box-1"):
            await connection.request({"op": "x"}, timeout_s=5)


async def test_silence_is_a_lost_sandbox(tmp_path: Path) -> None:
    async with agent(tmp_path, answering(b"")) as connection:
        with pytest.raises(SandboxLost, match="did not answer within"):
            await connection.request({"op": "x"}, timeout_s=0.1)


async def test_no_socket_is_a_lost_sandbox(tmp_path: Path) -> None:
    lease = Lease("l", "box-1", str(tmp_path / "none"), 5.0, 1000, 1000)
    with pytest.raises(SandboxLost, match="box-1"):
        await AgentSandbox.connect(lease)


async def test_refusal_keeps_the_connection(tmp_path: Path) -> None:
    connections = 0

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await answering(encode({"error": "refused", "detail": "disk full"}))(reader, writer)

    async with agent(tmp_path, refuse) as connection:
        for _ in range(2):
            with pytest.raises(FilesRefused, match="disk full"):
                await connection.request({"op": "x"}, timeout_s=5)
    assert connections == 1


async def test_answer_of_a_cancelled_request_is_never_taken_for_the_next_one(tmp_path: Path) -> None:
    async def count(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for number in range(3):
            await reader.readexactly(len(encode({"op": "x"})))
            await asyncio.sleep(0.05)
            writer.write(encode({"number": number}))

    async with agent(tmp_path, count) as connection:
        task = asyncio.ensure_future(connection.request({"op": "x"}, timeout_s=5))
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        answer, _ = await connection.request({"op": "x"}, timeout_s=5)
        assert answer["number"] == 0, "a new connection, so a new count"


async def test_ended_connection_is_not_opened_again(tmp_path: Path) -> None:
    async with agent(tmp_path, answering(encode({}))) as connection:
        await connection.request({"op": "x"}, timeout_s=5)
        connection.end()
        with pytest.raises(SandboxLost, match="given back"):
            await connection.request({"op": "x"}, timeout_s=5)
