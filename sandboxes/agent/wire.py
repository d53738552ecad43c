"""Framing of messages between host and agent, and the blocking side of it.

A message, both ways, is a 4-byte big-endian length, a JSON header of that length, and the binary blobs whose lengths
the header lists under "sizes".
"""

import json
import socket
from typing import Any

LARGEST_PART = 1 << 30
"""Longest header or blob in bytes; a longer one is no message but noise."""

SMALL = 1 << 18
"""Messages up to this size in bytes are sent with one system call."""


def encode(header: dict[str, Any], *blobs: bytes) -> bytes:
    """One message. `header` may not use the key "sizes"."""
    return b"".join((_prefix(header, blobs), *blobs))


def send(peer: socket.socket, header: dict[str, Any], *blobs: bytes) -> None:
    """Write one message, large ones without a second copy of them: the agent shares the sandbox's memory limit."""
    if sum(map(len, blobs)) <= SMALL:
        peer.sendall(encode(header, *blobs))
        return
    for part in (_prefix(header, blobs), *blobs):
        peer.sendall(part)


def receive(peer: socket.socket) -> tuple[dict[str, Any], list[bytearray]]:
    """Read one message. Raises `EOFError` when the peer has closed, `ValueError` or `KeyError` for noise."""
    header = json.loads(_exactly(peer, int.from_bytes(_exactly(peer, 4), "big")))
    return header, [_exactly(peer, size) for size in header["sizes"]]


def _prefix(header: dict[str, Any], blobs: tuple[bytes, ...]) -> bytes:
    text = json.dumps({**header, "sizes": [len(blob) for blob in blobs]}).encode()
    return len(text).to_bytes(4, "big") + text


def _exactly(peer: socket.socket, size: int) -> bytearray:
    if size > LARGEST_PART:
        raise ValueError(f"a part of {size} bytes is larger than any message")
    data = bytearray(size)
    view, got = memoryview(data), 0
    while got < size:
        count = peer.recv_into(view[got:])
        if not count:
            raise EOFError
        got += count
    return data
