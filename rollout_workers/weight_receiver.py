"""Receives published weights inside the engine's process, through vLLM's weight-transfer interface.

vLLM imports this module in the engine's process because `engines/vllm.py` names `WeightReceiver` as the worker
extension; the import registers the transfer engine there. Contract: `docs/weight-sync.md`. A whole set is checked
before the model is touched, so that a set which is refused leaves the engine as it was.

vLLM's layer-wise reload leaves two kernels on the CPU with stale or wrongly laid out copies of the weights, silently.
Each has a repair of its own below; no checksum sees what they mend, only log-probabilities do.
"""

import base64
import hashlib
import logging
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from vllm.config import ModelConfig, VllmConfig
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.parallel_state import get_world_group
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

from rollout_workers.errors import WeightSyncRejected
from rollout_workers.weight_channel import Channel, Member, sum64
from rollout_workers.weight_manifest import (
    IpcOffer,
    WeightManifest,
    boot_id,
    check_layout,
    checkpoint_shapes,
    choose_way,
    map_segment,
    require_checksum,
)

TRANSFER = "crosstrain"
"""Name of the backend in vLLM's registry."""

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def view_tensors(manifest: WeightManifest, flat_N: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """View the tensors in a set's bytes, without a copy. Raises `WeightSyncRejected` when they cannot be right."""
    tensors: list[tuple[str, torch.Tensor]] = []
    for entry in manifest.tensors:
        dtype = _DTYPES.get(entry.dtype)
        if dtype is None:
            raise WeightSyncRejected(
                f"weight manifest: {entry.name} has dtype {entry.dtype}, not one of {list(_DTYPES)}"
            )
        end = entry.offset + prod(entry.shape) * dtype.itemsize
        if entry.offset % dtype.itemsize or end > manifest.nbytes:
            raise WeightSyncRejected(f"weight manifest: {entry.name} at byte {entry.offset} does not fit the set")
        tensors.append((entry.name, flat_N[entry.offset : end].view(dtype).view(entry.shape)))
    # One look at the whole set, padding and all, costs less than a call for each tensor; those name the culprit.
    common, *others = {tensor.dtype for _, tensor in tensors}
    whole = manifest.nbytes - manifest.nbytes % common.itemsize
    if others or not is_finite(flat_N[:whole].view(common)):
        for name, tensor in tensors:
            if not is_finite(tensor):
                raise WeightSyncRejected(
                    f"weights of version {manifest.version}: {name} has values that are not finite"
                )
    return tensors


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether no value is NaN or infinite. A NaN becomes both extremes: one pass, no copy."""
    return all(bool(extreme.isfinite()) for extreme in tensor.aminmax())


def check_bytes(manifest: WeightManifest, flat_N: torch.Tensor) -> None:
    """Raises `WeightSyncRejected` unless the bytes have the manifest's size and checksum."""
    if len(flat_N) != manifest.nbytes or manifest.nbytes % 8:
        raise WeightSyncRejected(
            f"weights of version {manifest.version}: {len(flat_N)} bytes, the manifest names {manifest.nbytes}; "
            "a set is padded to whole words"
        )
    compute = sum64 if manifest.checksum_kind == "sum64" else sha256
    require_checksum(manifest, compute(flat_N))


def sha256(flat_N: torch.Tensor) -> str:
    """Checksum of a uint8 tensor in host memory, hexadecimal."""
    return hashlib.sha256(flat_N.numpy().data).hexdigest()


def map_buffer(offer: IpcOffer, nbytes: int, device: torch.device, version: int) -> torch.Tensor:
    """The trainer's buffer on this process's own GPU, uint8 of shape (nbytes,). Raises `WeightSyncRejected`."""
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    handle, counter, event = (base64.b64decode(text) for text in (offer.handle, offer.counter, offer.event))
    storage = (torch.UntypedStorage, torch.uint8, device.index, handle, offer.storage_bytes, offer.storage_offset)
    export = (counter, offer.counter_offset, event, offer.event_sync)
    try:
        return rebuild_cuda_tensor(torch.Tensor, (nbytes,), (1,), 0, *storage, False, *export)
    except RuntimeError as error:
        raise WeightSyncRejected(f"weights of version {version}: the trainer's GPU memory: {error}") from error


def load_tensors(model: nn.Module, config: ModelConfig, tensors: list[tuple[str, torch.Tensor]]) -> None:
    """vLLM's layer-wise reload: values are written into the storage that the kernels already hold."""
    initialize_layerwise_reload(model)
    model.load_weights(tensors)  # type: ignore[operator]  # every vLLM model has it; nn.Module does not say so
    finalize_layerwise_reload(model, config)


def repack_experts(model: nn.Module) -> None:
    """Lay the experts' weights out as the CPU's grouped matrix product wants them.

    The reload writes them in checkpoint order over the packed ones: vLLM packs only when it first builds the kernel.
    """
    for layer in model.modules():
        if hasattr(layer, "w13_weight"):
            layer.quant_method.moe_kernel.fused_experts.process_weights_after_loading(layer)  # type: ignore[union-attr]


def repack_output(model: nn.Module) -> None:
    """Renew the packed copy that the output layer's matrix product holds.

    A tied output layer shares the embedding's tensor: the reload sees no weights of its own and leaves the copy stale.
    """
    head = getattr(model, "lm_head", None)
    if isinstance(head, nn.Module) and hasattr(head, "quant_method"):
        head.quant_method.process_weights_after_loading(head)  # type: ignore[union-attr,operator]


@dataclass
class NoInit(WeightTransferInitInfo):
    """Each manifest says where its set is: there is no connection to set up."""


@dataclass
class ManifestInfo(WeightTransferUpdateInfo):
    """Carries one manifest."""

    manifest: dict[str, Any]


class ManifestTransfer(WeightTransferEngine[NoInit, ManifestInfo]):
    """Loads the weights that a manifest describes, by the best way that it offers this engine."""

    init_info_cls = NoInit
    update_info_cls = ManifestInfo
    repairs: ClassVar[tuple[Callable[[nn.Module], None], ...]] = (repack_experts, repack_output)

    def __init__(
        self, config: WeightTransferConfig, vllm_config: VllmConfig, device: torch.device, model: nn.Module
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        self._shapes = checkpoint_shapes(Path(vllm_config.model_config.model))
        tied = getattr(vllm_config.model_config.hf_text_config, "tie_word_embeddings", False)
        self._optional = frozenset({"lm_head.weight"} if tied else ())
        self._received: tuple[WeightManifest, list[tuple[str, torch.Tensor]]] | None = None
        self._machine = boot_id()
        self._gpu = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
        self._member: Member | None = None
        self._channel: Channel | None = None
        self.checksum = ""
        """Of the set that is loaded; empty for the weights of the model's directory."""

    def init_transfer_engine(self, init_info: NoInit) -> None:
        """Nothing to set up."""

    def start_weight_update(self) -> None:
        """Nothing, so that a failure before `finish` leaves the model as it is."""

    def receive_weights(self, update_info: ManifestInfo) -> None:
        """Check the whole set. Raises `WeightSyncRejected`; vLLM hands its text on to the caller."""
        manifest = WeightManifest.parse(update_info.manifest)
        check_layout(manifest, self._shapes, self._optional)
        self._received = (manifest, view_tensors(manifest, self._fetch(manifest)))

    def finish_weight_update(self) -> None:
        """Load the set that was received and mend what the reload leaves wrong."""
        assert self._received is not None, "vLLM calls finish only after a set was received"
        (manifest, tensors), self._received = self._received, None
        load_tensors(self.model, self.model_config, tensors)
        if current_platform.is_cpu():
            for repair in self.repairs:
                repair(self.model)
        else:
            torch.accelerator.synchronize()  # the trainer may overwrite what was mapped once this returns
        self.checksum = manifest.checksum

    def shutdown(self) -> None:
        """Let go of a set that was received and never loaded, and of the channel."""
        self._received = None
        if self._channel is not None:
            self._channel.close()

    def _fetch(self, manifest: WeightManifest) -> torch.Tensor:
        """The set's bytes, proven by their checksum."""
        member = self._introduced()
        way = choose_way(manifest, self._machine, self._gpu, member.ranks)
        if way == "segment":
            return torch.frombuffer(map_segment(manifest), dtype=torch.uint8)
        if way == "ipc":
            assert manifest.ipc is not None
            flat_N = map_buffer(manifest.ipc, manifest.nbytes, self.device, manifest.version)
        else:
            assert manifest.channel is not None
            if self._channel is None or (self._channel.offer, self._channel.backend) != (manifest.channel, way):
                if self._channel is not None:
                    self._channel.close()  # to a trainer that was there before
                device = self.device if way == "nccl" else torch.device("cpu")
                self._channel = Channel(manifest.channel, member, way, device)
            flat_N = self._channel.pull(manifest)
        check_bytes(manifest, flat_N)
        return flat_N

    def _introduced(self) -> Member:
        """Who this process is in the channel. All ranks of an engine come here together, the first time."""
        if self._member is None:
            world = get_world_group()
            own_name = uuid.uuid4().hex if world.rank_in_group == 0 else None
            engine = world.broadcast_object(own_name, src=0)
            assert isinstance(engine, str)
            self._member = Member(engine, world.rank_in_group, world.world_size)
        return self._member


class WeightReceiver:
    """Worker extension: its methods become methods of vLLM's worker."""

    weight_transfer_engine: ManifestTransfer

    def loaded_checksum(self) -> str:
        """Checksum of the loaded set."""
        return self.weight_transfer_engine.checksum


def is_fault(record: logging.LogRecord) -> bool:
    """Whether a record of vLLM's log is more than the news that a set of weights was refused, which the caller gets."""
    return record.exc_info is None or not isinstance(record.exc_info[1], WeightSyncRejected)


WeightTransferEngineFactory.register_engine(TRANSFER, ManifestTransfer)
logging.getLogger("vllm.v1.engine.core").addFilter(is_fault)
