"""Publisher and engines agree on the channel and on `sum64`, though they share no code: `docs/weight-sync.md`."""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, TCPStore
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from rollout_workers import weight_channel
from rollout_workers.errors import WeightSyncRejected
from rollout_workers.weight_channel import Channel, Deadlines, Member
from rollout_workers.weight_manifest import ChannelOffer, WeightManifest
from trainer import slots
from trainer.errors import PublishError
from trainer.policy import init_policy, load_policy
from trainer.publish import Publisher

pytestmark = pytest.mark.contract
SLOW_CHUNK = 1 << 12
"""Bytes: 2,000 chunks a set, which take a second, so that things can happen in the middle."""
SUMS = pytest.mark.parametrize("sum64", [slots.sum64, weight_channel.sum64], ids=["trainer", "engine"])


class Published:
    """A publisher whose weights move with every version, and what it published."""

    def __init__(self, policy: Path, directory: Path, **settings: Any) -> None:
        self.model = load_policy(policy)[0]
        self.publisher = Publisher(self.model, "channel", directory, **settings)

    def publish(self, version: int) -> WeightManifest:
        with torch.no_grad():
            next(self.model.parameters()).fill_(version)
        return WeightManifest.parse(self.publisher.publish(version))


PULL_FOR_EVER = """
import sys, torch
from rollout_workers.weight_channel import Channel, Member
from rollout_workers.weight_manifest import WeightManifest
manifest = WeightManifest.model_validate_json(sys.argv[1])
channel = Channel(manifest.channel, Member("doomed", 0, 1), "gloo", torch.device("cpu"))
channel.pull(manifest)
print("once", flush=True)
while True:
    channel.pull(manifest)
"""
Publish = Callable[..., Published]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("channel") / "policy"
    init_policy("tiny-moe", directory, seed=0)
    return directory


@pytest.fixture
def publisher(policy: Path, tmp_path: Path) -> Iterator[Publish]:
    made: list[Published] = []

    def make(**settings: Any) -> Published:
        made.append(Published(policy, tmp_path, **({"address": "127.0.0.1"} | settings)))
        return made[-1]

    before = set(threading.enumerate())
    yield make
    for published in made:
        published.publisher.close()
    assert set(threading.enumerate()) == before, "a thread is left"


def join(
    manifest: WeightManifest,
    name: str = "engine",
    *,
    rank: int = 0,
    ranks: int = 1,
    deadlines: Deadlines = Deadlines(),  # noqa: B008 - frozen
) -> Channel:
    assert manifest.channel is not None
    return Channel(manifest.channel, Member(name, rank, ranks), "gloo", torch.device("cpu"), deadlines)


def checksum(flat_N: torch.Tensor) -> str:
    return weight_channel.sum64(flat_N)


@pytest.mark.parametrize("on_device", [False, True])
def test_a_fetched_set_is_the_checkpoint_to_the_byte(policy: Path, publisher: Publish, on_device: bool) -> None:
    run = publisher(on_device=on_device)
    manifest = WeightManifest.parse(run.publisher.publish(1))
    assert (manifest.segment is None, manifest.ipc) == (on_device, None)
    flat_N = join(manifest).pull(manifest)
    checkpoint = load_file(policy / "model.safetensors")
    for entry in manifest.tensors:
        expected = checkpoint.pop(entry.name)
        found = flat_N[entry.offset : entry.offset + expected.nbytes].view(expected.dtype).view(entry.shape)
        assert torch.equal(found, expected)
    assert not checkpoint
    if on_device:
        assert manifest.checksum == checksum(flat_N)


def test_two_engines_are_served_at_once(publisher: Publish) -> None:
    run = publisher(on_device=True, chunk_bytes=SLOW_CHUNK)
    manifest = run.publish(1)
    engines = [join(manifest, name) for name in ("one", "two")]
    spans: list[tuple[float, float]] = []

    def pull(engine: Channel) -> str:
        began = time.monotonic()
        found = checksum(engine.pull(manifest))
        spans.append((began, time.monotonic()))
        return found

    with ThreadPoolExecutor() as pool:
        assert list(pool.map(pull, engines)) == [manifest.checksum] * 2
    assert max(began for began, _ in spans) < min(ended for _, ended in spans)


def together(ranks: list[Channel], manifest: WeightManifest) -> list[str]:
    """Checksums of what the ranks receive."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(lambda rank: checksum(rank.pull(manifest)), ranks))


def test_the_ranks_of_one_engine_receive_together_and_recover_together(publisher: Publish) -> None:
    run = publisher(on_device=True)
    manifest = run.publish(1)
    ranks = [join(manifest, rank=rank, ranks=3) for rank in range(3)]
    assert together(ranks, manifest) == [manifest.checksum] * 3
    manifest = run.publish(2)
    assert together(ranks, manifest) == [manifest.checksum] * 3
    ranks[1].close()
    manifest = run.publish(3)
    assert together(ranks, manifest) == [manifest.checksum] * 3
    for rank in ranks:
        rank.close()
    assert together(ranks, manifest) == [manifest.checksum] * 3


def test_a_version_that_is_gone_is_refused_and_the_current_one_still_comes(publisher: Publish) -> None:
    run = publisher(on_device=True)
    old = run.publish(1)
    engine = join(old)
    assert checksum(engine.pull(old)) == old.checksum
    run.publish(2)
    assert checksum(engine.pull(old)) == old.checksum, "the slot before is still there"
    new = run.publish(3)
    with pytest.raises(WeightSyncRejected, match="no slot of the trainer holds version 1 any more"):
        engine.pull(old)
    assert checksum(engine.pull(new)) == new.checksum


def test_a_slot_is_not_written_while_it_is_sent(publisher: Publish) -> None:
    run = publisher(on_device=True, chunk_bytes=SLOW_CHUNK)
    first = run.publish(1)
    engine = join(first)
    engine.pull(run.publish(2))  # joined
    with ThreadPoolExecutor() as pool:
        pulled = pool.submit(lambda: (checksum(engine.pull(first)), time.monotonic()))
        time.sleep(0.2)
        assert not pulled.done(), "the set is too small to be caught in the middle"
        run.publish(3)
        written = time.monotonic()
        found, received = pulled.result()
    assert found == first.checksum
    assert written > received - 0.1, "the write waited for the last chunk"


def test_a_closing_trainer_refuses_the_engine_that_it_sends_to(publisher: Publish) -> None:
    run = publisher(on_device=True, chunk_bytes=SLOW_CHUNK)
    manifest = run.publish(1)
    engine = join(manifest)
    with ThreadPoolExecutor() as pool:
        pulled = pool.submit(engine.pull, manifest)
        time.sleep(0.3)
        assert not pulled.done()
        began = time.monotonic()
        run.publisher.close()
        with pytest.raises(WeightSyncRejected, match="waited for the trainer's bytes"):
            pulled.result()
    assert time.monotonic() - began < 5


def test_an_engine_that_dies_is_left_behind(publisher: Publish) -> None:
    run = publisher(on_device=True, chunk_bytes=SLOW_CHUNK)
    manifest = run.publish(1)
    doomed = subprocess.Popen(
        [sys.executable, "-c", PULL_FOR_EVER, manifest.model_dump_json()], stdout=subprocess.PIPE, text=True
    )
    assert doomed.stdout is not None
    with doomed.stdout:
        assert doomed.stdout.readline() == "once\n"
        time.sleep(0.2)
        doomed.kill()
        doomed.wait()
    began = time.monotonic()
    assert checksum(join(manifest, "other").pull(manifest)) == manifest.checksum
    for version in (2, 3):
        run.publish(version)
    assert time.monotonic() - began < 5, "its slot is free again"


def joined(publisher: Publish) -> tuple[Channel, WeightManifest, TCPStore]:
    """An engine that has fetched once, what it fetched, and the store through which it asked."""
    manifest = publisher(on_device=True).publish(1)
    engine = join(manifest)
    engine.pull(manifest)
    assert manifest.channel is not None
    return engine, manifest, TCPStore(manifest.channel.host, manifest.channel.port, wait_for_workers=False)


def test_an_engine_that_the_trainer_gave_up_joins_again(publisher: Publish) -> None:
    engine, manifest, store = joined(publisher)
    store.queue_push("asks/engine-1", b"close")  # as after an hour of silence
    store.get("left/engine-1")
    assert checksum(engine.pull(manifest)) == manifest.checksum


def test_a_question_that_crosses_the_trainers_leave_is_answered(publisher: Publish) -> None:
    engine, manifest, store = joined(publisher)
    for group in range(1, 11):  # whichever comes first, the engine's look for the mark or the trainer's last look
        store.queue_push(f"asks/engine-{group}", b"close")
        try:
            engine.pull(manifest)  # it found the mark before it asked, and joined anew
        except WeightSyncRejected as refusal:
            assert "left this group" in str(refusal)
            engine.pull(manifest)


class SilentTrainer:
    """Follows the page as far as it is told to, then says nothing more."""

    def __init__(self, steps: int) -> None:
        """`steps`: 0 only hosts the store, 1 also makes the group."""
        self.store: TCPStore | None = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        offer = ChannelOffer(host="127.0.0.1", port=self.store.port, gpu="", chunk_bytes=64)
        entry = {"name": "a", "dtype": "float32", "shape": [16], "offset": 0}
        head = {"version": 7, "checksum": "", "checksum_kind": "sum64", "nbytes": 64, "tensors": [entry]}
        self.manifest = WeightManifest.parse({**head, "channel": offer})
        self.thread = threading.Thread(target=self.welcome, args=(TCPStore("127.0.0.1", offer.port),))
        if steps:
            self.thread.start()

    def welcome(self, store: TCPStore) -> None:
        joined = json.loads(store.queue_pop("joins"))
        own = PrefixStore(f"groups/{joined['group']}", store)
        group: Any = ProcessGroupGloo(own, 0, 1 + joined["ranks"], timedelta(seconds=10))
        group.broadcast(torch.zeros(8, dtype=torch.uint8), 0).wait()
        store.queue_pop(f"asks/{joined['group']}")

    def end(self) -> None:
        if self.thread.ident:
            self.thread.join()
        self.store = None


IMPATIENT = Deadlines(connect_s=0.5, join_s=1.0, answer_s=0.5, chunk_s=0.5)
WAITS = pytest.mark.parametrize(
    ("steps", "rank", "named"),
    [(0, 0, "to open the channel"), (0, 1, "rank 0 of this engine"), (1, 0, "the trainer's answer")],
)


@WAITS
def test_a_passed_deadline_names_what_was_waited_for(steps: int, rank: int, named: str) -> None:
    trainer = SilentTrainer(steps)
    began = time.monotonic()
    with pytest.raises(WeightSyncRejected, match=f"version 7: waited for .*{named}"):
        join(trainer.manifest, rank=rank, ranks=1 + rank, deadlines=IMPATIENT).pull(trainer.manifest)
    assert time.monotonic() - began < 5
    trainer.end()


@WAITS
def test_a_trainer_that_ends_while_it_is_waited_for_ends_the_wait(steps: int, rank: int, named: str) -> None:
    trainer = SilentTrainer(steps)
    with ThreadPoolExecutor() as pool:
        pulled = pool.submit(join(trainer.manifest, rank=rank, ranks=1 + rank).pull, trainer.manifest)
        time.sleep(0.5)
        assert not pulled.done()
        began = time.monotonic()
        trainer.end()
        with pytest.raises(WeightSyncRejected, match=named):
            pulled.result()
    assert time.monotonic() - began < 5


def test_an_unreachable_trainer_is_named() -> None:
    trainer = SilentTrainer(0)
    trainer.end()
    assert trainer.manifest.channel is not None
    with pytest.raises(
        WeightSyncRejected, match=rf"waited for the trainer at 127\.0\.0\.1:{trainer.manifest.channel.port}"
    ):
        join(trainer.manifest, deadlines=IMPATIENT).pull(trainer.manifest)


def test_the_channel_is_served_on_this_nodes_addresses_only(publisher: Publish) -> None:
    with pytest.raises(PublishError, match=r"203\.0\.113\.1"):
        publisher(address="203.0.113.1")


def test_torch_still_takes_a_handle_apart_as_the_ipc_offer_names_it() -> None:
    parameters = list(signature(rebuild_cuda_tensor).parameters)
    assert parameters[:4] == ["tensor_cls", "tensor_size", "tensor_stride", "tensor_offset"]
    assert parameters[4:10] == ["storage_cls", "dtype", *(f"storage_{of}" for of in ("device", "handle"))] + [
        f"storage_{of}_bytes" for of in ("size", "offset")
    ]
    counter = [f"ref_counter_{of}" for of in ("handle", "offset")]
    assert parameters[10:] == ["requires_grad", *counter, "event_handle", "event_sync_required"]


@SUMS
@given(words=st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=40))
def test_sum64_is_what_the_page_says(sum64: Callable[[torch.Tensor], str], words: list[int]) -> None:
    flat_N = torch.from_numpy(np.array(words, dtype=np.uint64).view(np.uint8).copy())
    assert sum64(flat_N) == f"{sum((2 * i + 1) * word for i, word in enumerate(words)) % 2**64:016x}"


@SUMS
def test_sum64_goes_on_over_its_own_parts(sum64: Callable[[torch.Tensor], str]) -> None:
    flat_N = torch.randint(0, 256, ((1 << 26) + 64,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    words = flat_N.numpy().view(np.uint64)
    assert sum64(flat_N) == f"{int((words * np.arange(1, 2 * len(words), 2, dtype=np.uint64)).sum()):016x}"


@SUMS
@given(content=st.binary(min_size=1, max_size=200), data=st.data())
def test_sum64_notices_any_flipped_bit(
    sum64: Callable[[torch.Tensor], str], content: bytes, data: st.DataObject
) -> None:
    flat_N = torch.frombuffer(bytearray(content.ljust(-(-len(content) // 8) * 8)), dtype=torch.uint8)
    before = sum64(flat_N)
    flat_N[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert sum64(flat_N) != before
