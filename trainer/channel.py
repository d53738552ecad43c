"""The sending half of the weight channel in `docs/weight-sync.md`: engines that cannot map a slot fetch it.

A store on this node is where engines announce themselves and ask; a process group of each engine, made without any
default group, is how the bytes go. One thread accepts, one thread serves each engine: a dead or slow engine holds up
nobody else, nor the next training step.
"""

import contextlib
import json
import logging
import socket
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store, TCPStore

from trainer.errors import PublishError
from trainer.slots import Slot, gpu_uuid

CHUNK_BYTES = 1 << 26
"""Bytes of one broadcast: large enough that its start costs nothing, small enough to stage in host memory."""
CHUNK_S = 30.0
"""Deadline of one broadcast. A chunk takes 0.6 s at 1 Gbit/s; an engine that is fifty times slower is stuck."""
JOIN_S = 30.0
"""Deadline for making the group with an engine: connections and NCCL's own start take seconds."""
IDLE_S = 3600.0
"""After so long without a question an engine counts as gone and its group is closed; a live one joins again."""
CLOSE_S = 2 * CHUNK_S
"""How long `close` waits for each thread: one that sends ends after its chunk."""

LEFT = "the trainer has left this group; the next update makes a new one"
"""Answer to what was asked of a group that came to its end."""

_JOINS = "joins"
_CLOSE = b"close"
_GREETING_BYTES = 8
_log = logging.getLogger(__name__)


class ChannelServer:
    """Serves the slots of one run until it is closed."""

    def __init__(
        self, slots: Sequence[Slot], device: torch.device, address: str, chunk_bytes: int = CHUNK_BYTES
    ) -> None:
        """`device`: where the slots lie. `address`: of this node, as engines reach it; a free port is taken.

        Raises PublishError when the address is not this node's.
        """
        self._slots = slots
        self._device = device
        self._address = address
        self._chunk_bytes = chunk_bytes
        self._closed = threading.Event()
        self._store: TCPStore | None
        self._store, self._port = _host_store(address)
        self._queues = [_JOINS]
        self._serving: list[threading.Thread] = []
        # Daemons, lest NCCL in the hands of a dead engine keeps the trainer from ending.
        self._accepting = threading.Thread(target=self._accept, name="weights", daemon=True)
        self._accepting.start()

    def offer(self) -> dict[str, Any]:
        """The manifest's `channel`."""
        return {
            "host": self._address,
            "port": self._port,
            "gpu": gpu_uuid(self._device),
            "chunk_bytes": self._chunk_bytes,
        }

    def close(self) -> None:
        """End all threads, then the store. Engines that wait are refused by the end of their connection. Idempotent."""
        if self._store is None:
            return
        self._closed.set()
        for queue in list(self._queues):
            self._store.queue_push(queue, _CLOSE)
        self._accepting.join(CLOSE_S)  # first, so that no thread begins after those that are waited for
        for thread in self._serving:
            thread.join(CLOSE_S)
        self._store = None

    def _connect(self) -> TCPStore:
        """A connection of the calling thread's own: one that waits lets no other question through."""
        return TCPStore(
            self._address, self._port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=IDLE_S)
        )

    def _next(self, store: Store, queue: str) -> dict[str, Any] | None:
        """What comes next in a queue; None for the end, by `close` or by silence."""
        if self._closed.is_set():
            return None
        try:
            message = store.queue_pop(queue)
        except torch.distributed.DistStoreError:  # nothing for IDLE_S
            return None
        return None if message == _CLOSE else json.loads(message)

    def _accept(self) -> None:
        store = self._connect()
        while not self._closed.is_set():
            join = self._next(store, _JOINS)
            if join is not None:
                # Known before its thread begins, so that `close` reaches it.
                self._queues.append(f"asks/{join['group']}")
                name = f"weights-{join['group']}"
                thread = threading.Thread(target=self._serve, args=(join,), name=name, daemon=True)
                self._serving = [*(other for other in self._serving if other.is_alive()), thread]
                thread.start()

    def _serve(self, join: dict[str, Any]) -> None:
        name = join["group"]
        queue = f"asks/{name}"
        store = self._connect()
        group: _Group | None = None
        try:
            group = _Group(store, name, join["ranks"], join["backend"], self._address)
            while (ask := self._next(store, queue)) is not None:
                self._answer(store, group, name, ask)
        except RuntimeError as error:  # what torch raises for a peer that is gone or late, and for a store that is
            _log.warning("engine %s left the weight channel: %s", name, str(error).partition("\n")[0])
        finally:
            self._queues.remove(queue)
            if group is not None:
                group.close()
            with contextlib.suppress(RuntimeError):  # the store has ended first: then nobody asks any more
                _take_leave(store, name)

    def _answer(self, store: Store, group: "_Group", name: str, ask: dict[str, Any]) -> None:
        """Send the set that was asked for, or say that it is gone."""
        number, version = ask["pull"], ask["version"]
        store.delete_key(f"answers/{name}/{number - 1}")
        for slot in self._slots:
            with slot.read(version, ask["checksum"]) as flat_N:
                if flat_N is None:
                    continue
                store.set(f"answers/{name}/{number}", "send")
                for chunk_C in flat_N.split(self._chunk_bytes):
                    if self._closed.is_set():
                        raise RuntimeError("the trainer closed while it was fetching")
                    group.broadcast(chunk_C)
                return
        store.set(f"answers/{name}/{number}", f"no slot of the trainer holds version {version} any more")


def _take_leave(store: Store, name: str) -> None:
    """Mark the group as left, then answer what was asked before; an engine looks for the mark after asking."""
    store.set(f"left/{name}", "")
    while store.queue_len(f"asks/{name}"):
        message = store.queue_pop(f"asks/{name}", False)
        if message != _CLOSE:
            store.set(f"answers/{name}/{json.loads(message)['pull']}", LEFT)


class _Group:
    """The process group of the trainer, its rank 0, and the ranks of one engine."""

    def __init__(self, store: Store, name: str, ranks: int, backend: str, address: str) -> None:
        """Returns once all ranks were heard of. Raises RuntimeError."""
        own = PrefixStore(f"groups/{name}", store)
        self._backend = backend
        make = _nccl if backend == "nccl" else _gloo
        self._group = make(own, 1 + ranks, address)
        # NCCL connects at the first broadcast: better now than with a slot on loan.
        self.broadcast(torch.zeros(_GREETING_BYTES, dtype=torch.uint8, device="cuda" if backend == "nccl" else "cpu"))

    def broadcast(self, chunk_C: Tensor) -> None:
        """Send to all ranks; from host memory unless by NCCL. Raises RuntimeError, also when the deadline passes."""
        work = self._group.broadcast(chunk_C if self._backend == "nccl" else chunk_C.cpu(), 0)
        deadline = time.monotonic() + CHUNK_S
        while not work.is_completed():  # and not `wait`, which for NCCL would wait on the device only
            if time.monotonic() > deadline:
                self.close()
                raise RuntimeError(f"{chunk_C.numel()} bytes were not taken in {CHUNK_S:.0f} s")
            time.sleep(0.0005)
        work.wait()  # raises what went wrong

    def close(self) -> None:
        """Let go of connections without asking the peer, who may be dead."""
        self._group.abort()


def _gloo(store: Store, size: int, address: str) -> Any:
    options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # the stubs lack it
    # By address: the default is what the node's name resolves to, often loopback.
    options._devices = [ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = timedelta(seconds=max(JOIN_S, CHUNK_S))
    return ProcessGroupGloo(store, 0, size, options)


def _nccl(store: Store, size: int, address: str) -> Any:
    from torch._C._distributed_c10d import ProcessGroupNCCL  # only in CUDA builds

    options: Any = ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=10 * CHUNK_S)  # its watchdog ends the process; our own deadline comes first
    return ProcessGroupNCCL(store, 0, size, options)


def node_address() -> str:
    """The IPv4 address by which other machines reach this one; loopback when there is no network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # reserved for documentation; a datagram socket sends nothing here
        except OSError:
            return "127.0.0.1"
        return probe.getsockname()[0]


def _host_store(address: str) -> tuple[TCPStore, int]:
    """A store that listens on this address only; torch's own listens on all."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.bind((address, 0))
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise PublishError(f"weights cannot be served on {address}: {error.strerror}.") from error
    port = listener.getsockname()[1]
    store = TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    return store, port
