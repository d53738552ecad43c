"""A resumed trainer is the one that was saved, and a checkpoint is whole or not there."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from trainer_kit import make_batch, make_policy

from trainer.config import TrainerConfig
from trainer.errors import CheckpointError
from trainer.policy import load_policy
from trainer.step import Trainer

CONFIG = TrainerConfig.model_validate({"minibatches": 2, "loss": {"kl": 0.1, "router_aux": 0.1}})


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_policy(tmp_path_factory.mktemp("policies") / "small")


@pytest.fixture
def saved(policy: Path, tmp_path: Path) -> Path:
    trainer = Trainer(policy, CONFIG)
    trainer.train_step(make_batch(0))
    trainer.save_checkpoint(tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def state(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


def test_the_step_after_a_resume_is_the_same_to_the_bit(policy: Path, tmp_path: Path) -> None:
    trainer = Trainer(policy, CONFIG, seed=3)
    for update in range(2):
        trainer.train_step(make_batch(update))
    trainer.save_checkpoint(tmp_path / "checkpoint")
    following = trainer.train_step(make_batch(2))

    resumed = Trainer(policy, CONFIG, seed=3)
    resumed.load_checkpoint(tmp_path / "checkpoint")
    assert (resumed.version, resumed.optimizer.steps) == (2, 4)
    again = resumed.train_step(make_batch(2))
    assert equal(state(trainer), state(resumed))
    assert (again.loss, again.grad_norm, again.learning_rate, again.tags, again.gradient_share) == (
        following.loss,
        following.grad_norm,
        following.learning_rate,
        following.tags,
        following.gradient_share,
    )


def test_generators_go_on_where_they_were(policy: Path, tmp_path: Path) -> None:
    trainer = Trainer(policy, CONFIG)
    trainer.save_checkpoint(tmp_path / "checkpoint")
    following = torch.rand(3)
    trainer.load_checkpoint(tmp_path / "checkpoint")
    assert torch.equal(torch.rand(3), following)


def test_a_checkpoint_holds_a_policy_that_loads_by_itself(saved: Path, policy: Path) -> None:
    model, _ = load_policy(saved / "policy")
    resumed = Trainer(policy, CONFIG)
    resumed.load_checkpoint(saved)
    assert equal(dict(model.state_dict()), state(resumed))


def test_a_newer_checkpoint_replaces_one_of_the_same_name(saved: Path, policy: Path) -> None:
    trainer = Trainer(policy, CONFIG)
    trainer.save_checkpoint(saved)
    resumed = Trainer(policy, CONFIG)
    resumed.load_checkpoint(saved)
    assert resumed.version == 0
    assert os.listdir(saved.parent) == [saved.name]


@pytest.mark.parametrize("name", ["trainer.pt", "policy/model.safetensors", "policy/config.json", "manifest.json"])
@pytest.mark.parametrize("kind", ["missing", "cut"])
def test_a_torn_directory_is_refused_and_changes_nothing(saved: Path, policy: Path, name: str, kind: str) -> None:
    content = (saved / name).read_bytes()
    if kind == "missing":
        (saved / name).unlink()
    else:
        (saved / name).write_bytes(content[: len(content) // 2])
    trainer = Trainer(policy, CONFIG)
    before = state(trainer)
    with pytest.raises(CheckpointError, match="use an older one") as raised:
        trainer.load_checkpoint(saved)
    assert name.split("/")[-1] in str(raised.value)
    assert "\n" not in str(raised.value)
    assert equal(before, state(trainer))
    assert trainer.version == 0


def test_a_spoilt_file_of_the_right_size_is_refused(saved: Path, policy: Path) -> None:
    size = (saved / "trainer.pt").stat().st_size
    (saved / "trainer.pt").write_bytes(b"x" * size)
    with pytest.raises(CheckpointError, match="cannot be read"):
        Trainer(policy, CONFIG).load_checkpoint(saved)


def test_a_place_that_holds_none_is_refused(policy: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"manifest\.json is missing"):
        Trainer(policy, CONFIG).load_checkpoint(tmp_path)


def test_a_checkpoint_of_another_architecture_is_refused_and_changes_nothing(saved: Path, policy: Path) -> None:
    other = make_policy(saved.parent / "other")
    settings = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(settings | {"num_hidden_layers": 1}))
    trainer = Trainer(other, CONFIG)
    before = state(trainer)
    with pytest.raises(CheckpointError, match="another architecture"):
        trainer.load_checkpoint(saved)
    assert equal(before, state(trainer))


FULL_DISK = """
import resource, signal, sys
from trainer.config import TrainerConfig
from trainer.errors import CheckpointError
from trainer.step import Trainer
policy, target = sys.argv[1:]
trainer = Trainer(policy, TrainerConfig())
trainer.save_checkpoint(target)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    trainer.save_checkpoint(target)
except CheckpointError as error:
    sys.stdout.write(str(error))
    sys.exit(0)
sys.exit("the second checkpoint was written")
"""


def test_a_disk_that_takes_no_more_leaves_the_older_checkpoint(policy: Path, tmp_path: Path) -> None:
    target = tmp_path / "checkpoint"
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(policy), str(target)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert "free space on that disk" in done.stdout
    assert "\n" not in done.stdout.strip()
    assert os.listdir(tmp_path) == ["checkpoint"]
    Trainer(policy, TrainerConfig()).load_checkpoint(target)
