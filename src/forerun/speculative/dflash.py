"""DFLASH: a block-diffusion draft that proposes a whole block in one pass.

propose: one pass over the block `[last_token, MASK, ...]`, which attends to context K/V; then the
draft's head chooses the tokens (`models/heads`; without one, each row's argmax). observe: context
K/V is computed from the target's hidden states of the tokens it just ran. K/V of rejected tokens
may be written too; the next block overwrites it.
(arXiv 2602.06036, sections 3 and 4.)
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from forerun.config.engine_config import EngineConfig
from forerun.config.model_config import ModelConfig
from forerun.core.errors import ConfigError
from forerun.models.dflash import DFlashServing, load_dflash
from forerun.models.dflash_config import DFlashConfig, load_dflash_config
from forerun.models.heads.base import Block, Draw
from forerun.models.heads.registry import HEAD_OPTIONS
from forerun.models.tokenizer import load_tokenizer
from forerun.speculative.base import (
    Draft,
    DraftContext,
    ObserveInput,
    Option,
    Phase,
    ProposeInput,
    SlotContext,
    SlotState,
    SpecCaps,
    SpeculativeAlgorithm,
)
from forerun.speculative.same_tokens import check_same_tokens
from forerun.speculative.sharding import of_rank

log = logging.getLogger("forerun")


class DFlash(SpeculativeAlgorithm):
    options: ClassVar[tuple[Option, ...]] = (
        Option(
            "speculative_dflash_block_size",
            int,
            None,
            "Tokens of a draft block; none: as trained. Smaller works, larger is refused",
        ),
        Option(
            "speculative_draft_layout",
            str,
            None,
            "Which row of a block predicts what, instead of what the draft says: fill-in (row k the"
            " token at its own place) or anchor-first (row k the one after)",
        ),
        *(Option(each.name, each.type, each.default, each.help) for each in HEAD_OPTIONS),
    )
    bundled_draft = "draft"
    quantizes_draft = True
    shards_draft = True

    @classmethod
    def resolve(cls, config: EngineConfig, target: ModelConfig, dtype: torch.dtype) -> SpecCaps:
        folder, draft = read_draft(config)
        check_fit(folder, draft, target)
        check_same_tokens(config, folder)
        _mask_token(config, draft, target)
        block = _block_size(config, draft)
        window = config.speculative_draft_window_size
        if window is not None and window < block:
            raise ConfigError(
                f"speculative_draft_window_size {window} is below the block size {block}; raise it."
            )
        drafts = draft.drafts_of(block)
        return SpecCaps(
            num_drafts=drafts,
            flexible=True,
            kv_reserve=max(block, drafts + 1),
            target_layers=draft.target_layer_ids,
            draft_kv=of_rank(config, folder, lambda comm: draft.kv_layout(dtype, comm)),
            draft_heads=draft.num_heads // config.draft_ranks,
            draft_hidden_size=draft.hidden_size,
            draft_attention=draft.layer_masks(window),
            draft_sinks=any(draft.sinks),
            draft_attends_in_prefill=False,
            deferred_observe=True,
            observes_packed=True,
            reads_hidden_states=False,
            draft_summary=draft.describe(),
            other_row_layout=_other_layout(draft, block),
        )

    def load(self, ctx: DraftContext) -> None:
        folder, config = read_draft(ctx.config)
        block = _block_size(ctx.config, config)
        window = ctx.config.speculative_draft_window_size
        quantization = ctx.quantization
        self._draft = load_dflash(
            folder,
            ctx.placement,
            ctx.max_positions,
            ctx.target,
            DFlashServing(block, window, ctx.config.algorithm_options, quantization),
            ctx.config.load_format,
        )
        if ctx.comm.rank == 0:
            log.info("The draft %s: %s", folder, config.describe())
            if config.layout_contradicts:
                log.warning(
                    "The draft %s was read as one of the other layout; if that was right, hardly a"
                    " draft is accepted with --speculative-draft-layout.",
                    folder,
                )
        self._config = config
        self._first = 0 if config.sample_from_anchor else 1  # first row of a block that predicts
        self._context: Tensor | None = None
        self._token_ids: Tensor | None = None  # of the columns of a pruned vocabulary
        if self._draft.d2t is not None:
            columns = torch.arange(config.draft_vocab_size, device=ctx.device)
            self._token_ids = self._draft.to_target_ids(columns)
        mask = _mask_token(ctx.config, config, ctx.target.config)
        self._masks = torch.full((1, block - 1), mask, dtype=torch.int64, device=ctx.device)
        self._offsets = torch.arange(block, dtype=torch.int32, device=ctx.device)

    def supports_target_verify_for_draft(self) -> bool:
        return True

    def create_future_map(self, ctx: SlotContext) -> SlotState:
        """C of the last committed token, if the head reads it."""
        head = self._config.head
        if head is None or not head.reads_context:
            return SlotState()
        shape, dtype = (ctx.slots, self._config.hidden_size), self._draft.norm.norm.weight.dtype
        self._context = torch.zeros(shape, dtype=dtype, device=ctx.device)
        return SlotState({"context": self._context})

    def propose(self, step: ProposeInput) -> Draft:
        proposal = self._draft.head.propose(self._run_block(step), self._draft, self._draw(step))
        return Draft(proposal.tokens, confidence=proposal.confidence)

    def _draw(self, step: ProposeInput) -> Draw:
        """Draws tokens for positions of this step."""

        def draw(scores: Tensor, first: int, columns: Tensor | None = None) -> Tensor:
            positions = step.start.unsqueeze(1) + self._offsets[: scores.shape[1]] + (first + 1)
            ids = self._token_ids if columns is None else self._draft.to_target_ids(columns)
            chosen = step.sample(scores, positions, ids)
            if columns is not None:
                chosen = columns.gather(-1, chosen.unsqueeze(-1)).squeeze(-1)
            return self._draft.to_target_ids(chosen)

        return draw

    def _depth(self, width: int) -> int:
        """Drafts of the block that a step of `width` tokens verifies."""
        return min(width - 1, self._config.drafts_of(len(self._offsets)))

    def _run_block(self, step: ProposeInput) -> Block:
        """One pass over the block.

        A block whose rows see those after them is whole, however few tokens the target verifies:
        with fewer masks, all of them would predict worse than they were trained to. A causal one
        ends with the last row that is wanted.
        """
        assert step.attention is not None
        depth = self._depth(step.num_verify_tokens)
        batch, block = step.slots.shape[0], len(self._offsets)
        if self._config.can_be_cut:
            block = self._first + depth
        # Before the embedding lookup, which then lies between KV slots and their first reader; see
        # `kernels/runtime/pdl.py`.
        attention = step.attention(block)
        masks = self._masks[:, : block - 1].expand(batch, -1)
        ids = torch.cat([step.last_token.unsqueeze(1), masks], dim=1)
        positions = step.positions
        if step.num_verify_tokens != block:
            positions = (step.start.unsqueeze(1) + self._offsets[:block]).flatten()
        hidden = self._draft.forward(self._draft.embed_block(ids), positions, attention)
        head, before = self._config.head, None
        if head is not None and head.reads_before:
            before = step.history[step.slots, (step.start - 1).clamp_min(0).long()].long()
        return Block(
            hidden=hidden.view(batch, block, -1),
            first=self._first,
            depth=depth,
            anchor=step.last_token,
            before=before,
            greedy=step.greedy,
            context=None if self._context is None else self._context[step.slots],
        )

    def propose_row_layouts(self, step: ProposeInput) -> Tensor:
        """Drafts in the draft's row layout and in the other one, from one pass over the block."""
        block = self._run_block(step)
        found = []
        for first in (self._first, 1 - self._first):
            config = self._config.in_layout(first == 0)
            rows = replace(block, first=first, depth=config.drafts_of(block.hidden.shape[1]))
            found.append(self._draft.head.propose(rows, self._draft, self._draw(step)).tokens)
        depth = min(tokens.shape[1] for tokens in found)
        return torch.stack([tokens[:, :depth] for tokens in found])

    def observe(self, step: ObserveInput) -> None:
        assert step.aux_hidden_states is not None
        # Prompt chunks may be ragged; all of their K/V is written.
        count = None if step.phase is Phase.PREFILL else step.num_committed
        context = self._draft.write_context_kv(
            step.aux_hidden_states, step.positions, step.attention, count
        )
        if self._context is not None:
            self._context[step.slots] = context[step.last_index]


# --- start-up checks ------------------------------------------------------------------------


LAYOUTS = {"fill-in": False, "anchor-first": True}


def read_draft(config: EngineConfig) -> tuple[Path, DFlashConfig]:
    """The draft's folder and config, in the row layout that is asked for.

    Raises:
        ConfigError: the config or the layout is invalid.
    """
    folder = config.required_draft_path()
    draft = load_dflash_config(folder)
    layout = config.algorithm_options["speculative_draft_layout"]
    if layout is None:
        return folder, draft
    if layout not in LAYOUTS:
        raise ConfigError(
            f"speculative_draft_layout must be {' or '.join(LAYOUTS)}, got {layout!r}."
        )
    return folder, draft.in_layout(LAYOUTS[layout])


def _other_layout(draft: DFlashConfig, block: int) -> str | None:
    """The setting that serves a draft in the other row layout.

    None: its head has one only, or a block of so few rows drafts nothing in one of them.
    """
    if draft.head is not None and draft.head.fill_in_only:
        return None
    if draft.in_layout(False).drafts_of(block) < 1:
        return None
    return f"--speculative-draft-layout {'fill-in' if draft.sample_from_anchor else 'anchor-first'}"


def _block_size(config: EngineConfig, draft: DFlashConfig) -> int:
    """Tokens of a block, from the two settings that can say it, within what was trained.

    Raises:
        ConfigError: they disagree, or the block cannot be served.
    """
    asked = config.algorithm_options["speculative_dflash_block_size"]
    tokens = config.speculative_num_draft_tokens
    extra = draft.num_drafts + 1 - draft.block_size  # tokens verified past the block
    if asked is not None and asked < 1:
        raise ConfigError(f"speculative_dflash_block_size must be positive, got {asked}.")
    if asked is not None and tokens is not None and tokens != asked + extra:
        raise ConfigError(
            f"speculative_dflash_block_size {asked} and speculative_num_draft_tokens {tokens}"
            f" disagree (expected {asked + extra}); set one of them."
        )
    block = int(asked or (tokens - extra if tokens is not None else draft.block_size))
    min_block = 2 - extra
    if block != draft.block_size and draft.head is not None and draft.head.fixed_block:
        raise ConfigError(
            f"A block of {block} tokens cannot be served: the {draft.head.files.name} head of this"
            f" draft has weights for {draft.block_size}; leave the block size out."
        )
    if not min_block <= block <= draft.block_size:
        raise ConfigError(
            f"A block of {block} tokens cannot be served: the draft was trained at"
            f" {draft.block_size}; choose {min_block} to {draft.block_size}."
        )
    return block


def check_fit(folder: Path, draft: DFlashConfig, target: ModelConfig) -> None:
    """
    Raises:
        ConfigError: the draft reads layers or has sizes that the target has not.
    """

    def refuse(what: str, of_draft: object, of_target: object) -> None:
        raise ConfigError(
            f"The draft {folder} does not fit the target: {what} {of_draft}, the target has"
            f" {of_target}. Use the draft that was trained for this target."
        )

    if draft.target_hidden_size != target.hidden_size:
        refuse(
            f"it reads hidden states of {len(draft.target_layer_ids)} x",
            draft.target_hidden_size,
            f"hidden size {target.hidden_size}",
        )
    if draft.hidden_size != target.hidden_size:  # embedding and lm_head are the target's
        refuse("its hidden size is", draft.hidden_size, target.hidden_size)
    if draft.num_target_layers not in (None, target.num_layers):
        refuse("it was trained for layers:", draft.num_target_layers, target.num_layers)
    if max(draft.target_layer_ids) >= target.num_layers:
        refuse("it reads layer", max(draft.target_layer_ids), f"{target.num_layers} layers")
    if draft.vocab_size != target.vocab_size:
        refuse("its vocabulary is", draft.vocab_size, target.vocab_size)


def _mask_token(config: EngineConfig, draft: DFlashConfig, target: ModelConfig) -> int:
    """The mask token's id, from the number or the string in the checkpoint; they must agree."""
    number, text = draft.mask_token_id, draft.mask_token
    if text is not None and not config.skip_tokenizer_init:
        known = _token_id(config, text)
        if known is None and number is None:
            raise ConfigError(f"The draft's mask token {text!r} is not in the tokenizer.")
        if number is not None and known is not None and known != number:
            raise ConfigError(
                f"The draft's mask_token_id is {number}, but the tokenizer has {text!r} at {known};"
                " use the draft's own tokenizer."
            )
        number = known if number is None else number
    if number is None:
        raise ConfigError("The draft names its mask token as text only; do not skip the tokenizer.")
    if not 0 <= number < target.vocab_size:
        raise ConfigError(
            f"The draft's mask_token_id {number} is outside the vocabulary of {target.vocab_size}."
        )
    return number


def _token_id(config: EngineConfig, token: str) -> int | None:
    folder = Path(str(config.tokenizer_path or config.model_path))
    found = load_tokenizer(folder).get_vocab().get(token)
    return None if found is None else int(found)
