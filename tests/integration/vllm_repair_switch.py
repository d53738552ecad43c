"""The weight receiver with repairs that a test can leave out. vLLM imports this in the engine's process."""

from collections.abc import Sequence

from rollout_workers import weight_receiver


class RepairSwitch(weight_receiver.WeightReceiver):
    """Worker extension."""

    def choose_repairs(self, names: Sequence[str]) -> None:
        """Do only these after the updates that follow."""
        repairs = tuple(getattr(weight_receiver, name) for name in names)
        self.weight_transfer_engine.repairs = repairs  # type: ignore[misc]  # shadows the class's on this instance
