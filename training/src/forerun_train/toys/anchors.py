"""Training data of drafts: anchors in responses, aux hidden states of the target, labels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel, Qwen3ForCausalLM

from forerun_train.toys.generate import causal_layers
from forerun_train.toys.regen import Samples


def target_aux_hidden_states(
    target: PreTrainedModel, ids: Tensor, layer_ids: tuple[int, ...]
) -> Tensor:
    """``[b, s, K·H]``: the outputs of the target's layers ``layer_ids``, concatenated.

    Hugging Face's ``hidden_states`` has the output of layer l at l + 1, except that of the last
    layer, which it gives normalized: families other than Qwen3 cannot be read there.
    """
    if isinstance(target, Qwen3ForCausalLM):
        outputs = list(causal_layers(target, ids))
    else:
        hidden_states = target.model(ids, output_hidden_states=True, use_cache=False).hidden_states
        outputs = list(hidden_states[1:-1])
    return torch.cat([outputs[layer] for layer in layer_ids], dim=-1)


def sample_anchors(
    prompt: Tensor, end: Tensor, count: int, generator: torch.Generator | None = None
) -> Tensor:
    """Stratified random positions in each response, ``[b, count]``; each has a next token."""
    jitter = torch.rand((len(end), count), generator=generator, device=end.device)
    share = (torch.arange(count, device=end.device) + jitter) / count
    return prompt[:, None] + (share * (end - 1 - prompt)[:, None]).long()


def block_labels(ids: Tensor, anchors: Tensor, end: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """The ``block - 1`` tokens after every anchor, and whether each is inside the response.

    Both are ``[b, n, block - 1]``.
    """
    place = anchors[:, :, None] + torch.arange(1, block, device=ids.device)
    inside = place < end[:, None, None]
    flat = place.clamp(max=ids.shape[1] - 1).flatten(1)
    return ids.gather(1, flat).view_as(place), inside


class Pool:
    """Samples on the device, padded to one length and shuffled every epoch."""

    def __init__(
        self, samples: Samples, batch: int, length: int, generator: torch.Generator
    ) -> None:
        device = generator.device
        self.batch, self.generator, self.at = batch, generator, 0
        self.ids = F.pad(
            torch.from_numpy(samples.ids.view("int16")).to(device),
            (0, length - samples.ids.shape[1]),
        )
        self.prompt = torch.from_numpy(samples.prompt).to(device)
        self.end = torch.from_numpy(samples.end).to(device)
        self.order = torch.randperm(len(samples), generator=generator, device=device)

    def next(self) -> tuple[Tensor, Tensor, Tensor]:
        if self.at + self.batch > len(self.order):
            self.order = torch.randperm(
                len(self.order), generator=self.generator, device=self.order.device
            )
            self.at = 0
        chosen = self.order[self.at : self.at + self.batch]
        self.at += self.batch
        return self.ids[chosen].long(), self.prompt[chosen], self.end[chosen]


class Mixture:
    """Batches sampled from all pools: ids [b, s], anchors [b, n], end [b]."""

    def __init__(
        self, samples: Sequence[Samples], batch: Sequence[int], anchors: int, seed: int, device: str
    ) -> None:
        self.anchors = anchors
        self.generator = torch.Generator(device).manual_seed(seed)
        length = max(s.ids.shape[1] for s in samples)
        self.pools = [
            Pool(s, rows, length, self.generator) for s, rows in zip(samples, batch, strict=True)
        ]

    def next(self) -> tuple[Tensor, Tensor, Tensor]:
        ids, prompt, end = (
            torch.cat(rows) for rows in zip(*(pool.next() for pool in self.pools), strict=True)
        )
        return ids, sample_anchors(prompt, end, self.anchors, self.generator), end


def accept_means(right: Tensor, batch: Sequence[int]) -> Tensor:
    """Mean accept length of each pool, bonus token included; ``right`` [b, n, k]."""
    accept = 1 + right.long().cumprod(-1).sum(-1).float().mean(-1)
    return torch.stack([rows.mean() for rows in accept.split(list(batch))])
