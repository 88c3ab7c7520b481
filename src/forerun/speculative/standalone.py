"""STANDALONE: any small model with the target's vocabulary, as a chain or a tree.

The draft decodes with a K/V cache of its own. `propose` runs it once per draft, from `last_token`
on, and samples with the target's noise; this also writes the K/V of accepted drafts. `observe` runs
the one token that `propose` did not: the last draft, or `last_token` in plain steps. Prompt chunks
are run as in the target. (Leviathan et al., arXiv 2211.17192.)

A tree (`beam_tree.py`) begins after `last_token`. The K/V of its beams is that of no path, so
`observe` runs all verified tokens.

A PARD draft (arXiv 2504.18583) predicts all tokens in one pass, over `last_token` and a mask token
for every further one. What it wrote for masks is overwritten: `observe` runs all verified tokens.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forerun.attention.base import LayerMask, Mask
from forerun.config.engine_config import EngineConfig
from forerun.config.model_config import ModelConfig, load_model_config
from forerun.core.errors import ConfigError, shown
from forerun.kvcache.layouts import ModelLayout
from forerun.layers.communication import Communicator, WeightPlacement
from forerun.models.formats.registry import weight_format
from forerun.models.loader import load_target_at
from forerun.models.registry import model_class
from forerun.models.safetensors_files import FIX_FOLDER
from forerun.models.speculators import refuse_speculators
from forerun.models.tokenizer import load_tokenizer
from forerun.speculative.base import (
    Draft,
    DraftAttention,
    DraftContext,
    ObserveInput,
    Phase,
    ProposeInput,
    SpecCaps,
    SpeculativeAlgorithm,
)
from forerun.speculative.beam_tree import AT_ONCE, TOPK, Beams, BeamTree, propose_tree, resolve_tree
from forerun.speculative.chain import (
    NUM_STEPS,
    PARALLEL_STEPS,
    resolve_num_drafts,
    sample_chain,
    sample_rows,
)
from forerun.speculative.sharding import of_rank

log = logging.getLogger("forerun")
DEFAULT_STEPS = 4


class Standalone(SpeculativeAlgorithm):
    options = (NUM_STEPS, TOPK)
    shards_draft = True
    quantizes_draft = True

    @classmethod
    def resolve(cls, config: EngineConfig, target: ModelConfig, dtype: torch.dtype) -> SpecCaps:
        folder, model = _read(config)
        mask = mask_token(folder, model)
        drafts = resolve_num_drafts(config, default_steps(mask), trees=True)
        _check_vocabulary(config, folder, model, target)
        if model.longest_context < (context := config.context_length or target.max_position):
            log.warning(
                "The draft %s has %d positions, fewer than the context length %d; beyond them"
                " few drafts are accepted.",
                folder, model.longest_context, context,
            )  # fmt: skip
        caps = SpecCaps(
            num_drafts=drafts,
            flexible=True,
            kv_reserve=drafts + 1,
            draft_kv=_layout(config, folder, model, dtype),
            draft_heads=model.num_heads // config.draft_ranks,
            draft_hidden_size=model.hidden_size,
            draft_attention=tuple(LayerMask(Mask.CAUSAL, window) for window in model.windows),
            deferred_observe=True,
            reads_hidden_states=False,
        )
        return resolve_tree(config, caps, None if mask is None else AT_ONCE)

    def load(self, ctx: DraftContext) -> None:
        folder, config = _read(ctx.config)
        quantization = ctx.asked_quantization
        place = WeightPlacement(ctx.dtype, ctx.device, ctx.comm, quantization, allocate=False)
        self._draft = load_target_at(place, folder, ctx.config.load_format, ctx.max_positions)
        self._clamps_ids = config.vocab_size < ctx.target.config.vocab_size
        self._mask = mask_token(folder, config)
        self._tree = BeamTree.of(ctx.config, ctx.caps)
        if self._mask is not None and ctx.comm.rank == 0:
            log.info("The draft %s predicts in parallel; its mask is token %d.", folder, self._mask)

    def supports_target_verify_for_draft(self) -> bool:
        return True

    def propose(self, step: ProposeInput) -> Draft:
        attention = step.attention
        assert attention is not None
        if self._mask is not None:
            return self._propose_at_once(step, attention, self._mask)
        if self._tree is not None:
            return self._propose_tree(step, attention, self._tree)

        def run(i: int, token: Tensor) -> Tensor:
            """[B] int64, at `start` + i -> logits [B, V]."""
            ids, context = self._clamped(token), attention(1, i)
            return self._draft.compute_logits(self._draft.forward(ids, step.start + i, context)[0])

        return sample_chain(step, run(0, step.last_token), run)

    def _propose_tree(self, step: ProposeInput, attention: DraftAttention, tree: BeamTree) -> Draft:
        """Runs `last_token`, and then beams after it."""

        def run(beams: Beams) -> Tensor:
            ids, context = self._clamped(beams.paths).flatten(), beams.attention(step, 1)
            places = torch.arange(1, beams.paths.shape[2] + 1, device=ids.device)
            positions = step.start.view(-1, 1, 1) + places.expand(beams.paths.shape)
            out = self._draft.forward(ids, positions.flatten(), context)[0]
            return out.view(*beams.paths.shape, -1)[:, :, -1]

        ids = self._clamped(step.last_token)
        first = self._draft.forward(ids, step.start, attention(1))[0]
        return propose_tree(step, tree, first, (run, self._draft.compute_logits))

    def _propose_at_once(self, step: ProposeInput, attention: DraftAttention, mask: int) -> Draft:
        """Runs `last_token` and a mask for all drafts but one; masks see those before them."""
        batch, count = step.slots.shape[0], step.num_verify_tokens - 1
        context = attention(count)
        masks = torch.full_like(step.slots, mask).unsqueeze(1).expand(-1, count - 1)
        ids = torch.cat((self._clamped(step.last_token).unsqueeze(1), masks), 1).flatten()
        positions = step.positions.view(batch, -1)[:, :count].flatten()
        logits = self._draft.compute_logits(self._draft.forward(ids, positions, context)[0])
        return sample_rows(step, logits.view(batch, count, -1))

    def observe(self, step: ObserveInput) -> None:
        ids = self._clamped(step.input_ids)
        whole = self._mask is not None or self._tree is not None
        if step.phase is not Phase.VERIFY or whole:
            self._draft.forward(ids, step.positions, step.attention)
            return
        # `propose` ran all tokens but the last.
        width = step.q_lens[0]
        last = ids.view(-1, width)[:, -1].contiguous()
        self._draft.forward(last, step.start + (width - 1), step.token_attention(width - 1))

    def _clamped(self, ids: Tensor) -> Tensor:
        """Ids beyond the draft's vocabulary pad the target's; no tokenizer produces them."""
        return ids.clamp_max(self._draft.config.vocab_size - 1) if self._clamps_ids else ids


# --- start-up checks ------------------------------------------------------------------------

MASK_KEYS = "pard_token", "ptd_token_id"  # of config.json


def default_steps(mask: int | None) -> int:
    """Drafts per step where no setting says another number. `mask`: of `mask_token`."""
    return DEFAULT_STEPS if mask is None else PARALLEL_STEPS


def mask_token(folder: Path, draft: ModelConfig) -> int | None:
    """Returns the token that stands for those to predict, of a draft that predicts in parallel.

    Raises:
        ConfigError: it is no id of the draft's vocabulary, or there are two.
    """
    given = {name: draft.raw[name] for name in MASK_KEYS if draft.raw.get(name) is not None}
    if not given:
        return None
    name, mask = next(iter(given.items()))
    if any(other != mask for other in given.values()):
        raise ConfigError(f"{folder}: {' and '.join(MASK_KEYS)} differ; correct config.json.")
    if type(mask) is not int or not 0 <= mask < draft.vocab_size:
        raise ConfigError(
            f"{folder}: {name} {shown(mask)} is no token of its vocabulary of {draft.vocab_size}."
        )
    return mask


def _read(config: EngineConfig) -> tuple[Path, ModelConfig]:
    folder = config.required_draft_path()
    return folder, read_standalone(folder)


def read_standalone(folder: Path) -> ModelConfig:
    """The config of a model that can be a draft.

    Raises:
        ConfigError: there is none, or the engine lacks its architecture.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder; {FIX_FOLDER}.")
    refuse_speculators(folder)
    model = load_model_config(folder)
    draft = model_class(model)  # refuses unknown architectures
    if draft.has_recurrent_layers:
        raise ConfigError(
            f"the draft {folder} ({model.architecture}) has recurrent layers, whose state a draft"
            " does not keep; use a model with attention alone, or another speculative_algorithm."
        )
    return model


def _layout(
    config: EngineConfig, folder: Path, draft: ModelConfig, dtype: torch.dtype
) -> ModelLayout:
    """What the draft's layers keep on a rank, which may differ (Gemma 4).

    Raises:
        ConfigError: the draft cannot be divided as the settings ask for.
    """
    ranks, build = config.draft_ranks, model_class(draft)
    if ranks > 1 and weight_format(draft) is not None:
        raise ConfigError(
            f"speculative_draft_tp_size {ranks}: the draft {folder} is quantized and cannot be"
            " divided; drop the setting."
        )

    def layout(comm: Communicator) -> ModelLayout:
        place = WeightPlacement(dtype, torch.device("meta"), comm)
        return build(draft, place, max_positions=1).kv_layout(dtype)

    return of_rank(config, folder, layout)


def _check_vocabulary(
    config: EngineConfig, folder: Path, draft: ModelConfig, target: ModelConfig
) -> None:
    """Tokens must have the same ids. Padding may differ if tokenizers can be compared.

    Raises:
        ConfigError: vocabularies or tokenizers differ.
    """
    sizes = f"the draft {folder} has a vocabulary of {draft.vocab_size}, the target"
    sizes += f" {target.vocab_size}"
    own = config.tokenizer_path or config.model_path
    if config.skip_tokenizer_init or own is None:
        if draft.vocab_size != target.vocab_size:
            raise ConfigError(
                f"Without tokenizers to compare, vocabularies must have the same size, but {sizes}."
                " Use a draft of the target's family."
            )
        return
    theirs, ours = _vocabulary(folder), _vocabulary(Path(own).expanduser())
    mask = mask_token(folder, draft)
    if mask is not None:  # added to the draft's
        theirs = {token: i for token, i in theirs.items() if i != mask}
        ours = {token: i for token, i in ours.items() if i != mask}
    if theirs != ours:
        differing = min(token for token, _ in theirs.items() ^ ours.items())
        raise ConfigError(
            f"The tokenizer of the draft {folder} is not the target's: they have {len(theirs)} and"
            f" {len(ours)} tokens and differ at {differing!r}. Use a draft of the same family."
        )
    if max(ours.values()) >= draft.vocab_size:
        raise ConfigError(f"Not every token has an id in the draft: {sizes}. Use another draft.")


def _vocabulary(folder: Path) -> dict[str, Any]:
    advice = (
        "Copy the target's there if the draft was trained with it, or set skip_tokenizer_init to"
        " work on token ids."
    )
    return dict(load_tokenizer(folder, advice).get_vocab())
