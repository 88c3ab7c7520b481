"""Training the DFlash draft on the target's own responses."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen3ForCausalLM

from forerun.train.draft_model import Draft
from forerun.train.generate import causal_layers
from forerun.train.regen import Samples
from forerun.train.target import cosine


@dataclass(frozen=True)
class DraftRun:
    seconds: float = 400.0
    max_steps: int = 200_000
    batch: tuple[int, ...] = (40, 152)
    """Rows of each pool in a step: worked sums, Python."""
    anchors: int = 16
    gamma: float = 7.0
    dpace: float = 0.0
    """Above 0: weigh positions by how likely a step gets there (D-PACE's alpha), not by gamma."""
    lr: float = 1.5e-3
    final_lr: float = 0.01
    warmup: float = 0.04
    save_every: int = 1500
    compile: bool = True
    seed: int = 0


def target_features(target: Qwen3ForCausalLM, ids: Tensor, layer_ids: tuple[int, ...]) -> Tensor:
    """``[b, s, K·H]``: the outputs of the target's layers ``layer_ids``, concatenated.

    Hugging Face's ``hidden_states`` has the output of layer l at l + 1.
    """
    outputs = list(causal_layers(target, ids))
    return torch.cat([outputs[layer] for layer in layer_ids], dim=-1)


def sample_anchors(
    prompt: Tensor, end: Tensor, count: int, generator: torch.Generator | None = None
) -> Tensor:
    """``[b, count]`` positions spread over each response, which has the token after each too."""
    jitter = torch.rand((len(end), count), generator=generator, device=end.device)
    share = (torch.arange(count, device=end.device) + jitter) / count
    return prompt[:, None] + (share * (end - 1 - prompt)[:, None]).long()


def block_inputs(ids: Tensor, anchors: Tensor, block: int, mask_token: int) -> Tensor:
    """``[b, n·block]`` token ids: the anchor's own token, then masks."""
    b, n = anchors.shape
    blocks = ids.new_full((b, n, block), mask_token)
    blocks[:, :, 0] = ids.gather(1, anchors)
    return blocks.flatten(1)


def block_labels(ids: Tensor, anchors: Tensor, end: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Labels ``[b, n, block - 1]`` of rows 1 …, and which of them lie inside the response."""
    place = anchors[:, :, None] + torch.arange(1, block, device=ids.device)
    inside = place < end[:, None, None]
    flat = place.clamp(max=ids.shape[1] - 1).flatten(1)
    return ids.gather(1, flat).view_as(place), inside


def draft_logits(
    draft: Draft, target: Qwen3ForCausalLM, ids: Tensor, features: Tensor, anchors: Tensor
) -> Tensor:
    """``[b, n, block - 1, V]`` through the target's embedding and head."""
    s, (b, n) = draft.shape, anchors.shape
    blocks = target.model.embed_tokens(block_inputs(ids, anchors, s.block_size, s.mask_token_id))
    hidden = draft(blocks, features, anchors).view(b, n, s.block_size, -1)[:, :, 1:]
    logits: Tensor = target.lm_head(hidden)
    return logits


def position_weights(losses: Tensor, inside: Tensor, run: DraftRun) -> Tensor:
    """Weights ``[b, n, block - 1]``, detached.

    Early draft tokens count more, since all later ones hang on them.
    """
    if run.dpace > 0:
        likely = torch.exp(-losses.detach()) * (1 - run.dpace) + run.dpace
        reached = (likely * inside).cumprod(-1)
        return reached.flip(-1).cumsum(-1).flip(-1) * inside
    place = torch.arange(losses.shape[-1], device=losses.device)
    return torch.exp(-place / run.gamma) * inside


class Pool:
    """Samples on the device, padded to one length, handed out shuffled, again and again."""

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


def train_draft(
    draft: Draft,
    target: Qwen3ForCausalLM,
    samples: Sequence[Samples],
    run: DraftRun,
    log: Path,
    save: Callable[[], None],
) -> dict[str, float]:
    """Train in place until the steps or the seconds are used up, with a ``save`` now and then.

    The target is frozen.
    """
    device = next(draft.parameters()).device.type
    generator = torch.Generator(device).manual_seed(run.seed)
    length = max(s.ids.shape[1] for s in samples)
    pools = [Pool(s, batch, length, generator) for s, batch in zip(samples, run.batch, strict=True)]
    target.requires_grad_(False)
    optimizer = torch.optim.AdamW(
        draft.parameters(), lr=run.lr, betas=(0.9, 0.95), weight_decay=0.0, fused=device == "cuda"
    )

    def loss_of(ids: Tensor, anchors: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            with torch.no_grad():
                features = target_features(target, ids, draft.shape.target_layer_ids)
            logits = draft_logits(draft, target, ids, features, anchors)
        labels, inside = block_labels(ids, anchors, end, draft.shape.block_size)
        losses = F.cross_entropy(
            logits.float().flatten(0, 2), labels.flatten(), reduction="none"
        ).view_as(labels)
        w = position_weights(losses, inside, run)
        with torch.no_grad():  # mean accept length over anchors, bonus counted
            right = (logits.argmax(-1) == labels) & inside
            accept = 1 + right.long().cumprod(-1).sum(-1).float().mean(-1)
        return (losses * w).sum() / w.sum(), accept

    step_loss = torch.compile(loss_of) if run.compile else loss_of
    draft.train()
    started, step = 0.0, 0
    shown: list[Tensor] = []
    with log.open("w") as lines:
        while True:
            if step == 5 or (step == 0 and not run.compile):  # compiling is not training time
                started = time.perf_counter()
            done = max(
                step / run.max_steps,
                (time.perf_counter() - started) / run.seconds if started else 0.0,
            )
            if done >= 1:
                break
            rate = run.lr * min(1.0, max(done, 1e-3) / run.warmup) * cosine(done, run.final_lr)
            for group in optimizer.param_groups:
                group["lr"] = rate
            ids, prompt, end = (
                torch.cat(rows) for rows in zip(*(pool.next() for pool in pools), strict=True)
            )
            loss, accept = step_loss(ids, sample_anchors(prompt, end, run.anchors, generator), end)
            loss.backward()
            nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            shown.append(torch.stack([loss.detach(), *(a.mean() for a in accept.split(run.batch))]))
            step += 1
            if step % 500 == 0 or step == 20:
                mean = [round(x, 4) for x in torch.stack(shown).mean(0).tolist()]
                shown.clear()
                spent = round(time.perf_counter() - started, 1)
                line = {"step": step, "seconds": spent, "loss": mean[0], "accept": mean[1:]}
                lines.write(json.dumps(line) + "\n")
                print("draft", line, flush=True)
            if step % run.save_every == 0:
                save()
    spent = time.perf_counter() - started
    return {
        "steps": step,
        "seconds": round(spent, 1),
        "blocks": step * sum(run.batch) * run.anchors,
    }
