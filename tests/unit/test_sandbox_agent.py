"""The parts of the exec agent that need no container."""

import os
import socket
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandboxes.agent.__main__ import main
from sandboxes.agent.command import Bounded
from sandboxes.agent.files import Refused, read_files, wipe, write_file
from sandboxes.agent.wire import LARGEST_PART, SMALL, encode, receive, send
from sandboxes.client import joined


@given(st.lists(st.binary(max_size=40), max_size=30), st.integers(2, 60))
def test_bounded_keeps_both_ends(pieces: list[bytes], bound: int) -> None:
    stream, whole = Bounded(bound), b"".join(pieces)
    for piece in pieces:
        stream.add(piece)
    half = bound // 2
    assert stream.length == len(whole)
    assert len(stream.head) + len(stream.tail) <= bound
    text, cut = joined(stream.head, stream.tail, stream.length)
    assert cut == (len(whole) > 2 * half)
    if cut:
        assert text.startswith(whole[:half]) and text.endswith(whole[len(whole) - half :])
        assert b"[... %d bytes left out ...]" % (len(whole) - 2 * half) in text
    else:
        assert text == whole


HEADERS = st.dictionaries(st.text(max_size=8).filter(lambda key: key != "sizes"), st.text() | st.integers() | st.none())


@given(HEADERS, st.lists(st.binary(max_size=200), max_size=5))
def test_messages_survive_the_wire(header: dict[str, object], blobs: list[bytes]) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(encode(header, *blobs))
        received, parts = receive(theirs)
    assert parts == blobs
    assert received == {**header, "sizes": [len(blob) for blob in blobs]}


def test_large_message_is_sent_in_parts() -> None:
    ours, theirs = socket.socketpair()
    blobs = (os.urandom(SMALL), b"", os.urandom(SMALL))
    with ours, theirs:
        sender = threading.Thread(target=send, args=(ours, {"op": "x"}, *blobs))
        sender.start()
        _, parts = receive(theirs)
        sender.join()
    assert tuple(parts) == blobs


@pytest.mark.parametrize("noise", [b"", b"\0\0", b"\0\0\0\x10short", b"\0\0\0\x03abc", b"\0\0\0\x02{}"])
def test_noise_is_no_message(noise: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(noise)
        ours.close()
        with pytest.raises((EOFError, ValueError, KeyError)):
            receive(theirs)


def test_absurd_length_is_refused_before_memory_is_taken() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall((LARGEST_PART + 1).to_bytes(4, "big"))
        with pytest.raises(ValueError, match="larger than any message"):
            receive(theirs)


def test_wipe_empties_whatever_is_there(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").touch()
    top = tmp_path / "top"
    (top / "a" / "b").mkdir(parents=True)
    (top / "a" / "b" / "file").touch()
    (top / "a" / "link").symlink_to(outside)
    (top / "link").symlink_to(outside)
    os.mkfifo(top / "pipe")
    assert wipe(str(top)) == []
    assert list(top.iterdir()) == []
    assert (outside / "kept").exists()


def test_wipe_of_any_depth(tmp_path: Path) -> None:
    home = os.open(".", os.O_RDONLY)
    try:
        os.chdir(tmp_path)
        for _ in range(1500):
            os.mkdir("d")
            os.chdir("d")
    finally:
        os.fchdir(home)
        os.close(home)
    assert wipe(str(tmp_path)) == []


def test_agent_refuses_to_run_outside_a_sandbox() -> None:
    assert os.getpid() != 1
    with pytest.raises(SystemExit, match="process 1 of a sandbox only"):
        main(1.0)


def test_reading_is_bounded_in_total(tmp_path: Path) -> None:
    write_file(str(tmp_path / "a/b"), b"12345")
    write_file(str(tmp_path / "c"), b"678")
    assert read_files(str(tmp_path), 8) == {"a/b": b"12345", "c": b"678"}
    with pytest.raises(Refused, match="larger"):
        read_files(str(tmp_path), 7)


def test_writing_follows_no_link(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("old")
    (tmp_path / "link").symlink_to("target")
    os.link(tmp_path / "target", tmp_path / "hard")
    write_file(str(tmp_path / "link"), b"new")
    write_file(str(tmp_path / "hard"), b"new")
    assert (tmp_path / "target").read_text() == "old"
    assert read_files(str(tmp_path), 100) == {"target": b"old", "link": b"new", "hard": b"new"}
