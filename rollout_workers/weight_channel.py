"""The fetching half of the weight channel in `docs/weight-sync.md`: ask the trainer for a version, receive its bytes.

The engine joins at its first update and keeps the group; after any failure it lets go and joins anew under another
name. Every wait has a deadline, and what torch raises becomes `WeightSyncRejected` in one place.
"""

import contextlib
import json
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, TCPStore

from rollout_workers.errors import WeightSyncRejected
from rollout_workers.weight_manifest import ChannelOffer, WeightManifest

_GREETING_BYTES = 8
_LEFT = "the trainer has left this group; the next update makes a new one"


@dataclass(frozen=True, slots=True)
class Member:
    """One process of an engine, for example `Member("5f0c…", rank=0, ranks=1)`."""

    engine: str
    """Unique name of the engine, the same in all its processes."""
    rank: int
    """Number of the process in the engine."""
    ranks: int
    """Processes of the engine."""


@dataclass(frozen=True, slots=True)
class Deadlines:
    """How long an engine waits for what, in seconds."""

    connect_s: float = 10.0
    """For reaching the trainer's store, which listens before any manifest names it."""
    join_s: float = 30.0
    """For making the group with the trainer: connections and NCCL's own start take seconds."""
    answer_s: float = 30.0
    """For the trainer's answer. A thread of its own waits for this engine's questions, so it comes at once."""
    chunk_s: float = 30.0
    """For one broadcast. The trainer's chunk takes 0.6 s at 1 Gbit/s; fifty times slower is stuck."""


class Channel:
    """The connection of one engine process to one trainer, made when it is first needed."""

    def __init__(
        self,
        offer: ChannelOffer,
        member: Member,
        backend: str,
        device: torch.device,
        deadlines: Deadlines = Deadlines(),
    ) -> None:
        """`backend`: "nccl" or "gloo". `device`: where sets are received, host memory for gloo."""
        self.offer = offer
        self.backend = backend
        self._member = member
        self._device = device
        self._deadlines = deadlines
        self._store: TCPStore | None = None
        self._group: _Group | None = None
        self._pulls = 0
        self._joins = 0
        self._waits_for = ""

    def pull(self, manifest: WeightManifest) -> torch.Tensor:
        """The set's bytes, uint8 of shape (nbytes,), unchecked.

        Raises `WeightSyncRejected` naming what was waited for, or that the trainer holds the version no more.
        """
        self._pulls += 1
        try:
            with self._rejecting(manifest.version):
                answer = self._ask(manifest)
                if answer == "send":
                    return self._receive(manifest.nbytes)
        except WeightSyncRejected:
            self.close()  # its group may be in the middle of something; the next update begins afresh
            raise
        raise WeightSyncRejected(f"weights of version {manifest.version}: {answer}")

    def close(self) -> None:
        """Let go of group and store. Idempotent; the next `pull` makes them anew."""
        self._leave()
        self._store = None

    def _leave(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None

    @contextlib.contextmanager
    def _rejecting(self, version: int) -> Iterator[None]:
        """The one place where torch's exceptions become ours."""
        try:
            yield
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise WeightSyncRejected(f"weights of version {version}: waited for {self._waits_for}: {reason}") from error

    def _ask(self, manifest: WeightManifest) -> str:
        """Put the question, joining first where need be, and return the answer."""
        member, number = self._member, self._pulls
        store = self._connected()
        name = self._agree(store, number)
        if self._group is None or self._group.name != name:
            self._waits_for = f"the trainer at {self.offer.host}:{self.offer.port} to open the channel"
            self._leave()
            self._group = _Group(store, name, member, self.backend, self._device, self.offer, self._deadlines)
        if member.rank == 0:
            ask = {"pull": number, "version": manifest.version, "checksum": manifest.checksum}
            store.queue_push(f"asks/{name}", json.dumps(ask).encode())
            if store.check([f"left/{name}"]):  # after asking: what was asked before it left, the trainer answers
                store.set(f"answers/{name}/{number}", _LEFT)
        self._waits_for = "the trainer's answer"
        store.set_timeout(timedelta(seconds=self._deadlines.answer_s))
        return store.get(f"answers/{name}/{number}").decode()

    def _connected(self) -> TCPStore:
        if self._store is None:
            self._waits_for = f"the trainer at {self.offer.host}:{self.offer.port}"
            self._store = TCPStore(
                self.offer.host,
                self.offer.port,
                is_master=False,
                wait_for_workers=False,
                timeout=timedelta(seconds=self._deadlines.connect_s),
            )
        return self._store

    def _agree(self, store: TCPStore, number: int) -> str:
        """Name of the group for this pull: the old one while trainer and all ranks hold it, else a new one.

        Rank 0 decides once every rank has said what it holds, so that ranks which lost a group in the middle of an
        update are together again in the next.
        """
        member, held = self._member, self._group.name if self._group is not None else ""
        prefix = f"pulls/{member.engine}/{number}"
        if member.rank:
            self._waits_for = "rank 0 of this engine"
            store.set_timeout(timedelta(seconds=self._deadlines.join_s))
            store.set(f"{prefix}/{member.rank}", held)
            return store.get(prefix).decode()
        self._waits_for = "the other ranks of this engine"
        store.set_timeout(timedelta(seconds=self._deadlines.join_s))
        others = {store.get(f"{prefix}/{rank}").decode() for rank in range(1, member.ranks)}
        self._waits_for = "the trainer's store"
        if not held or others - {held} or store.check([f"left/{held}"]):
            if self._joins:  # the trainer's thread of the old group, if it still waits, need not do so for an hour
                store.queue_push(f"asks/{member.engine}-{self._joins}", b"close")
            self._joins += 1
            held = f"{member.engine}-{self._joins}"
            join = {"group": held, "ranks": member.ranks, "backend": self.backend}
            store.queue_push("joins", json.dumps(join).encode())
        if member.ranks > 1:
            store.set(prefix, held)
            self._forget(store, number - 1)
        return held

    def _forget(self, store: TCPStore, number: int) -> None:
        """Delete what an earlier pull left in the store."""
        prefix = f"pulls/{self._member.engine}/{number}"
        for key in (prefix, *(f"{prefix}/{rank}" for rank in range(1, self._member.ranks))):
            store.delete_key(key)

    def _receive(self, nbytes: int) -> torch.Tensor:
        assert self._group is not None
        self._waits_for = "the trainer's bytes"
        flat_N = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        for chunk_C in flat_N.split(self.offer.chunk_bytes):
            self._group.receive(chunk_C)
        return flat_N


class _Group:
    """The process group of the trainer, its rank 0, and this engine's ranks."""

    def __init__(
        self,
        store: TCPStore,
        name: str,
        member: Member,
        backend: str,
        device: torch.device,
        offer: ChannelOffer,
        deadlines: Deadlines,
    ) -> None:
        """Returns once the trainer was heard of. Raises RuntimeError."""
        self.name = name
        self._chunk_s = deadlines.chunk_s
        own = PrefixStore(f"groups/{name}", store)
        rank, size = 1 + member.rank, 1 + member.ranks
        if backend == "nccl":
            self._group = _nccl(own, rank, size, 10 * deadlines.chunk_s)
        else:
            self._group = _gloo(own, rank, size, deadlines.join_s, offer.host)
        self.receive(torch.empty(_GREETING_BYTES, dtype=torch.uint8, device=device))

    def receive(self, chunk_C: torch.Tensor) -> None:
        """Fill the tensor with the next broadcast. Raises RuntimeError, also when the deadline passes."""
        work = self._group.broadcast(chunk_C, 0)
        deadline = time.monotonic() + self._chunk_s
        while not work.is_completed():  # and not `wait`, which for NCCL would wait on the device only
            if time.monotonic() > deadline:
                self.close()
                raise RuntimeError(f"{chunk_C.numel()} bytes did not come in {self._chunk_s:.0f} s")
            time.sleep(0.0005)
        work.wait()  # raises what went wrong, and orders this device's later work after it

    def close(self) -> None:
        """Let go of connections without asking the peer, who may be dead."""
        self._group.abort()


def _gloo(store: PrefixStore, rank: int, size: int, timeout_s: float, host: str) -> Any:
    options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # the stubs lack it
    # By address: the default is what the node's name resolves to, often loopback.
    options._devices = [ProcessGroupGloo.create_device(hostname=address_towards(host))]
    options._timeout = timedelta(seconds=timeout_s)
    return ProcessGroupGloo(store, rank, size, options)


def _nccl(store: PrefixStore, rank: int, size: int, timeout_s: float) -> Any:
    from torch._C._distributed_c10d import ProcessGroupNCCL  # only in CUDA builds

    options: Any = ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)  # its watchdog ends the process; our own deadline comes first
    return ProcessGroupNCCL(store, rank, size, options)


def address_towards(host: str) -> str:
    """This machine's IPv4 address on the way to another. Raises RuntimeError when there is no way."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))  # a datagram socket sends nothing here
        except OSError as error:
            raise RuntimeError(f"no way to {host}: {error.strerror}") from error
        return probe.getsockname()[0]


def sum64(flat_N: torch.Tensor) -> str:
    """Checksum of a uint8 tensor as `docs/weight-sync.md` defines it, computed where the bytes lie."""
    words_W = flat_N.view(torch.int64)
    total = torch.zeros((), dtype=torch.int64, device=flat_N.device)
    first = 0
    for part_W in words_W.split(1 << 23):  # 64 MiB, so that the products take little memory beside the set
        weights_W = torch.arange(first, first + len(part_W), device=flat_N.device) * 2 + 1
        total += (weights_W * part_W).sum()
        first += len(part_W)
    return f"{int(total) % 2**64:016x}"
