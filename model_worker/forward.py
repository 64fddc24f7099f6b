"""One forward of a model over a flattened batch, attending over the paged KV."""

from __future__ import annotations

from typing import Any

import torch

from model_worker.attention import AttentionBackend, AttentionBatch
from model_worker.attention.hook import attending
from model_worker.input_batch import FlatBatch
from model_worker.kv_tensors import KvTensors
from model_worker.loader import LoadedModel


class PagedForward:
    """Runs a loaded model on flattened batches: no padding, no cache of transformers'."""

    def __init__(
        self, loaded: LoadedModel, backend: AttentionBackend, *, is_batch_invariant: bool = False
    ) -> None:
        """is_batch_invariant: whether that was established, see `model_worker.modes`."""
        self.loaded = loaded
        self.backend = backend
        self.is_batch_invariant = is_batch_invariant

    def __call__(self, batch: FlatBatch, kv: KvTensors) -> torch.Tensor:
        """Logits float32[R, vocab_size], on the CPU, of the batch's R logit rows.

        Writes the keys and values of the batch's tokens into `kv`.
        """
        device = self.loaded.device
        rows = torch.from_numpy(batch.logit_rows).to(device)
        arguments = {"logits_to_keep": rows} if self.loaded.slices_logits else {}
        with torch.inference_mode(), attending(self._attend_with(batch.attention, kv)):
            output = self.loaded.model(
                input_ids=torch.from_numpy(batch.input_ids).to(device)[None],
                position_ids=torch.from_numpy(batch.positions).to(device)[None],
                use_cache=False,
                **arguments,
            )
            logits = output.logits[0]
            if not self.loaded.slices_logits:
                logits = logits[rows]
            return logits.float().cpu()

    def _attend_with(self, batch: AttentionBatch, kv: KvTensors) -> Any:
        backend = self.backend
        plan = backend.plan(batch, kv.block_size, kv.device)

        def attend(
            module: Any,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            mask: Any,
            _keywords: dict[str, Any],
        ) -> torch.Tensor:
            assert mask is None, "models on paged attention build no masks"
            out = backend.forward(
                kv.layers[module.layer_idx],
                query[0].transpose(0, 1),
                key[0].transpose(0, 1),
                value[0].transpose(0, 1),
                plan,
            )
            return out[None]

        return attend
