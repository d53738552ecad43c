"""Publisher and receiver agree on the weight manifest, though they share no code: `docs/weight-sync.md`."""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from rollout_workers.errors import WeightSyncRejected
from rollout_workers.weight_manifest import (
    SegmentOffer,
    WeightManifest,
    boot_id,
    check_layout,
    checkpoint_shapes,
    choose_way,
    map_segment,
)
from trainer.policy import init_policy, load_policy
from trainer.publish import Publisher

pytestmark = pytest.mark.contract


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("manifest") / "policy"
    init_policy("tiny-moe", directory, seed=0)
    return directory


@pytest.fixture(scope="module")
def published(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    publisher = Publisher(load_policy(policy)[0], "manifest", tmp_path_factory.mktemp("segments"))
    yield publisher.publish(3)
    publisher.close()


def test_a_published_set_holds_the_checkpoint_to_the_byte(policy: Path, published: dict[str, Any]) -> None:
    manifest = WeightManifest.parse(published)
    segment = map_segment(manifest)
    checkpoint = load_file(policy / "model.safetensors")
    for entry in manifest.tensors:
        assert entry.dtype == "float32"
        expected = checkpoint.pop(entry.name)
        assert entry.shape == expected.shape
        assert entry.offset % 64 == 0
        found = np.frombuffer(segment, np.float32, count=expected.size, offset=entry.offset)
        assert np.array_equal(found, expected.ravel())
    assert not checkpoint


def test_a_published_set_has_the_layout_of_the_checkpoint(policy: Path, published: dict[str, Any]) -> None:
    check_layout(WeightManifest.parse(published), checkpoint_shapes(policy), frozenset())


def test_shapes_are_read_from_all_shards(policy: Path, tmp_path: Path) -> None:
    model, _ = load_policy(policy)
    model.save_pretrained(tmp_path, max_shard_size="2MB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert checkpoint_shapes(tmp_path) == checkpoint_shapes(policy)


@given(data=st.data())
def test_any_change_of_names_or_shapes_is_refused(data: st.DataObject) -> None:
    shapes = data.draw(
        st.dictionaries(st.text("abc.", min_size=1), st.lists(st.integers(1, 4), max_size=3).map(tuple), min_size=2)
    )
    tensors = [{"name": name, "dtype": "float32", "shape": shape, "offset": 0} for name, shape in shapes.items()]
    victim = data.draw(st.integers(0, len(tensors) - 1))
    change = data.draw(st.sampled_from(["drop", "rename", "reshape", "repeat"]))
    if change == "drop":
        del tensors[victim]
    elif change == "rename":
        tensors[victim]["name"] = "d"
    elif change == "reshape":
        tensors[victim]["shape"] = (*shapes[str(tensors[victim]["name"])], 2)
    else:
        tensors.append(tensors[victim])
    manifest = WeightManifest.parse(
        {"version": 1, "checksum": "", "checksum_kind": "sha256", "nbytes": 64, "tensors": tensors}
    )
    with pytest.raises(WeightSyncRejected):
        check_layout(manifest, shapes, frozenset())


def test_a_tied_output_layer_may_be_named_or_not() -> None:
    entry = {"name": "embed", "dtype": "float32", "shape": [4], "offset": 0}
    head = {**entry, "name": "lm_head.weight"}
    for tensors in ([entry], [entry, head]):
        manifest = WeightManifest.parse(
            {"version": 1, "checksum": "", "checksum_kind": "sha256", "nbytes": 64, "tensors": tensors}
        )
        check_layout(manifest, {"embed": (4,)}, frozenset({"lm_head.weight"}))


@pytest.mark.parametrize("key", ["version", "checksum", "checksum_kind", "nbytes", "tensors"])
def test_a_manifest_without_a_key_is_refused_by_its_name(published: dict[str, Any], key: str) -> None:
    with pytest.raises(WeightSyncRejected, match=key):
        WeightManifest.parse({name: value for name, value in published.items() if name != key})


def test_an_unknown_key_is_refused(published: dict[str, Any]) -> None:
    with pytest.raises(WeightSyncRejected, match="transport"):
        WeightManifest.parse({**published, "transport": "pigeon"})


@given(content=st.binary(min_size=1, max_size=200), data=st.data())
def test_any_flipped_bit_is_noticed(
    content: bytes, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "flipped"
    spoilt = bytearray(content)
    spoilt[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(spoilt)
    with pytest.raises(WeightSyncRejected, match="checksum"):
        map_segment(describe(path, content))


def test_writing_to_the_mapping_leaves_the_segment_alone(tmp_path: Path) -> None:
    path = tmp_path / "segment"
    path.write_bytes(b"weights")
    segment = map_segment(describe(path, b"weights"))
    segment[:1] = b"W"
    assert path.read_bytes() == b"weights"
    segment.close()


def test_a_segment_may_be_longer_than_the_set(tmp_path: Path) -> None:
    path = tmp_path / "segment"
    path.write_bytes(b"weights" + os.urandom(9))
    segment = map_segment(describe(path, b"weights"))
    assert segment[:] == b"weights"
    segment.close()


ELSEWHERE = "a machine that is not this one"
IPC = {
    "gpu": "GPU-1",
    "handle": "",
    "storage_bytes": 64,
    "storage_offset": 0,
    "counter": "",
    "counter_offset": 0,
    "event": "",
    "event_sync": True,
}


@pytest.mark.parametrize(
    ("machine", "gpu", "ranks", "way"),
    [
        ("here", "", 1, "segment"),
        ("here", "GPU-2", 4, "segment"),
        (ELSEWHERE, "", 1, "gloo"),
        (ELSEWHERE, "GPU-2", 1, "gloo"),
    ],
)
def test_a_set_in_host_memory_is_mapped_on_its_machine_and_fetched_elsewhere(
    published: dict[str, Any], machine: str, gpu: str, ranks: int, way: str
) -> None:
    machine = boot_id() if machine == "here" else machine
    assert choose_way(WeightManifest.parse(published), machine, gpu, ranks) == way


@pytest.mark.parametrize(
    ("gpu", "ranks", "way"), [("GPU-1", 1, "ipc"), ("GPU-2", 1, "nccl"), ("GPU-2", 8, "nccl"), ("", 1, "gloo")]
)
def test_a_set_on_a_gpu_is_mapped_on_its_gpu_and_fetched_elsewhere(
    published: dict[str, Any], gpu: str, ranks: int, way: str
) -> None:
    on_gpu = {name: value for name, value in published.items() if name != "segment"}
    on_gpu |= {"ipc": IPC, "channel": {**published["channel"], "gpu": "GPU-1"}}
    assert choose_way(WeightManifest.parse(on_gpu), boot_id(), gpu, ranks) == way


def test_a_segment_that_this_container_does_not_see_is_fetched(published: dict[str, Any], tmp_path: Path) -> None:
    unseen = {**published, "segment": {**published["segment"], "path": str(tmp_path / "unseen")}}
    assert choose_way(WeightManifest.parse(unseen), boot_id(), "") == "gloo"
    del unseen["channel"]
    assert choose_way(WeightManifest.parse(unseen), boot_id(), "") == "segment"  # which then names the missing file


def test_a_manifest_without_a_way_to_the_engine_is_refused(published: dict[str, Any]) -> None:
    manifest = WeightManifest.parse({name: value for name, value in published.items() if name != "channel"})
    with pytest.raises(WeightSyncRejected, match="no way"):
        choose_way(manifest, ELSEWHERE, "")


def describe(path: Path, content: bytes) -> WeightManifest:
    return WeightManifest(
        version=1,
        checksum=hashlib.sha256(content).hexdigest(),
        checksum_kind="sha256",
        segment=SegmentOffer(path=str(path), boot_id=boot_id()),
        nbytes=len(content),
        tensors=({"name": "a", "dtype": "float32", "shape": [1], "offset": 0},),  # type: ignore[arg-type]
    )
