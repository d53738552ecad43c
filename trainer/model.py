"""The policy as the loss sees it: logits where tokens are trained, and the routes of the tokens to experts.

Shape suffixes: B sequences, T padded tokens, N trained tokens, V vocabulary, L layers with experts, E experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from trainer.batching import MicroBatch
from trainer.losses import token_logprobs


@dataclass(frozen=True, slots=True)
class Routing:
    """Where the routers sent the tokens of one micro-batch, padding left out."""

    probability_sum_LE: Tensor
    """Router probabilities summed over tokens; carries gradient."""
    counts_LE: Tensor
    """Tokens sent to each expert; every token counts once for each expert it goes to."""
    tokens: int
    """Real tokens."""


class PolicyModel:
    """A causal language model on a device, in evaluation mode: with dropout it would not be the engine's policy."""

    def __init__(self, model: PreTrainedModel, device: torch.device, dtype: Literal["float32", "bfloat16"]) -> None:
        self.hf = model.to(device).eval()  # type: ignore[arg-type]
        self.device = device
        text = model.config.get_text_config()
        self.vocabulary: int = text.vocab_size
        self.longest: int = getattr(text, "max_position_embeddings", None) or 1 << 30
        self._top_k: int | None = getattr(text, "num_experts_per_tok", None)
        self._bfloat16 = dtype == "bfloat16"

    def forward(self, batch: MicroBatch) -> tuple[Tensor, Routing | None]:
        """Logits that predict the trained tokens, shape (N, V), float32, and the routing, None without experts."""
        logits_BTV, router_logits = self._run(batch.token_ids_BT)
        logits_NV = logits_BTV.flatten(0, 1).index_select(0, batch.predictors_N).float()
        return logits_NV, self._routing(router_logits, batch.valid_BT) if router_logits else None

    @torch.no_grad()
    def logprobs(self, batch: MicroBatch) -> Tensor:
        """log π of the trained tokens, shape N, without gradient."""
        return token_logprobs(self.forward(batch)[0], batch.targets_N)

    @torch.no_grad()
    def sequence_logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """log π of each token after the first, in float32 and at temperature 1: one value fewer than tokens."""
        token_ids_BT = torch.tensor([list(token_ids)], device=self.device)
        logits_BTV = self.hf(input_ids=token_ids_BT, use_cache=False).logits
        return token_logprobs(logits_BTV[0, :-1], token_ids_BT[0, 1:]).tolist()

    def _run(self, token_ids_BT: Tensor) -> tuple[Tensor, tuple[Tensor, ...] | None]:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self._bfloat16):
            if self._top_k is None:
                return self.hf(input_ids=token_ids_BT, use_cache=False).logits, None
            output = self.hf(input_ids=token_ids_BT, use_cache=False, output_router_logits=True)
        return output.logits, getattr(output, "router_logits", None)

    def _routing(self, router_logits: tuple[Tensor, ...], valid_BT: Tensor) -> Routing:
        assert self._top_k is not None
        rows_M = valid_BT.flatten().nonzero().squeeze(1)
        probability_LME = torch.stack([logits.flatten(0, -2)[rows_M] for logits in router_logits]).float().softmax(-1)
        layers, tokens, experts = probability_LME.shape
        chosen_LMK = probability_LME.detach().topk(self._top_k, dim=-1).indices
        counts_LE = torch.zeros(layers, experts, device=self.device)
        counts_LE.scatter_add_(1, chosen_LMK.flatten(1), torch.ones(layers, tokens * self._top_k, device=self.device))
        return Routing(probability_LME.sum(1), counts_LE, tokens)
