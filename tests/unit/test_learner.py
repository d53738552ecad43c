"""The trainer as a service: warm start, publications, checkpoints, and one source for version, weights and probe."""

from pathlib import Path

import pytest

from trainer.config import SftConfig, TrainerConfig
from trainer.errors import PolicyError
from trainer.learner import Learner
from trainer.sample import Sample
from trainer.sft import Demonstration

PROBE = ((72, 105, 33), (65, 66, 67, 68))
DEMONSTRATIONS = [
    Demonstration(tuple(text.encode()), (0,) * 3 + (1,) * (len(text) - 3), tag)
    for tag, text in (("a", "abcdef"), ("a", "abcxyz"), ("b", "123456"))
]


@pytest.fixture
def learner(tmp_path: Path):
    learner = Learner(
        str(tmp_path / "initial"),
        "tiny-moe",
        TrainerConfig(),
        SftConfig(steps=4, batch_size=4),
        seed=0,
        run=tmp_path.name,
    )
    learner.ready()
    yield learner
    learner.close()


def sample(advantage: float) -> Sample:
    ids = tuple(b"hello")
    return Sample(ids, (0, 0, 1, 1, 1), (0.0, 0.0, -5.0, -5.0, -5.0), (advantage,) * 5, (0.2,) * 5, "a")


def test_the_preset_is_made_once(learner: Learner, tmp_path: Path) -> None:
    assert (tmp_path / "initial" / "config.json").is_file()
    before = (tmp_path / "initial" / "model.safetensors").stat().st_mtime_ns
    again = Learner(str(tmp_path / "initial"), "tiny-moe", TrainerConfig(), SftConfig(), seed=1, run="x")
    again.ready()
    assert (tmp_path / "initial" / "model.safetensors").stat().st_mtime_ns == before


def test_a_missing_policy_is_refused(tmp_path: Path) -> None:
    missing = Learner(str(tmp_path / "nowhere"), "", TrainerConfig(), SftConfig(), seed=0, run="x")
    with pytest.raises(PolicyError, match="nowhere"):
        missing.begin_rl(tmp_path / "start", PROBE)


def test_the_warm_start_lowers_the_loss_and_is_where_training_begins(learner: Learner, tmp_path: Path) -> None:
    first = learner.sft(DEMONSTRATIONS, 0, 2)
    last = learner.sft(DEMONSTRATIONS, 2, 2)
    assert last[-1].loss < first[0].loss
    published = learner.begin_rl(tmp_path / "start", PROBE)
    assert (tmp_path / "start" / "config.json").is_file()
    assert published.version == learner.version() == published.manifest["version"] == 0
    assert [len(row) for row in published.probe_logprobs] == [2, 3]


def test_each_step_publishes_a_new_version_with_the_probe_of_its_own_weights(learner: Learner, tmp_path: Path) -> None:
    zero = learner.begin_rl(tmp_path / "start", PROBE)
    one = learner.train([sample(1.0), sample(-1.0)]).published
    two = learner.train([sample(1.0)]).published
    assert [p.version for p in (zero, one, two)] == [0, 1, 2]
    assert len({p.manifest["checksum"] for p in (zero, one, two)}) == 3
    assert one.manifest["segment"] != two.manifest["segment"], "two slots in turn"
    assert zero.probe_logprobs != two.probe_logprobs


def test_a_checkpoint_goes_on_where_it_was(learner: Learner, tmp_path: Path) -> None:
    learner.begin_rl(tmp_path / "start", PROBE)
    learner.train([sample(1.0)])
    learner.save(tmp_path / "checkpoint")
    wanted = learner.train([sample(-1.0), sample(1.0)]).published
    other = Learner(
        str(tmp_path / "initial"), "tiny-moe", TrainerConfig(), SftConfig(), seed=0, run=f"{tmp_path.name}-2"
    )
    try:
        assert other.restore(tmp_path / "start", tmp_path / "checkpoint", PROBE).version == 1
        again = other.train([sample(-1.0), sample(1.0)]).published
        assert again.manifest["checksum"] == wanted.manifest["checksum"]
        assert again.probe_logprobs == wanted.probe_logprobs
    finally:
        other.close()


def test_the_policy_is_exported_as_a_model_directory(learner: Learner, tmp_path: Path) -> None:
    learner.begin_rl(tmp_path / "start", PROBE)
    learner.export(tmp_path / "policy")
    assert (tmp_path / "policy" / "model.safetensors").is_file()
    assert (tmp_path / "policy" / "tokenizer.json").is_file()


def test_nothing_is_left_in_shared_memory(learner: Learner, tmp_path: Path) -> None:
    path = Path(learner.begin_rl(tmp_path / "start", PROBE).manifest["segment"]["path"])
    assert path.exists()
    learner.close()
    assert not path.exists()
    learner.close()
