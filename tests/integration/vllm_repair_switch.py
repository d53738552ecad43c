"""The weight receiver with a repair that a test can leave out. vLLM imports this in the engine's process."""

from rollout_workers.weight_receiver import ManifestTransfer, WeightReceiver


class RepairSwitch(WeightReceiver):
    """Worker extension."""

    def leave_out(self, name: str) -> None:
        """Do all repairs but this one after the updates that follow."""
        repairs = tuple(repair for repair in ManifestTransfer.repairs if repair.__name__ != name)
        self.weight_transfer_engine.repairs = repairs  # type: ignore[misc]  # shadows the class's on this instance
