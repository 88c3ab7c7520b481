"""Builds the draft that the options describe, with its first weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from forerun.config.json_files import read_json
from forerun.config.model_config import ModelConfig
from forerun.core.errors import ConfigError, shown
from forerun.models.decoder_layer import PreNormDecoderLayer
from forerun.models.dflash_config import DFlashConfig, parse_dflash_config
from forerun.models.draft_base import OFFSETS, OWN_HEAD
from forerun.models.eagle3_config import parse_eagle3_config
from forerun.models.heads.gru import DominoConfig
from forerun.models.heads.markov import MarkovConfig
from forerun.models.heads.selector import SelectorConfig
from forerun.models.llama import LlamaDecoderLayer
from forerun.models.qwen2 import Qwen2DecoderLayer
from forerun.models.qwen3 import Qwen3DecoderLayer
from forerun.models.registry import model_class
from forerun.models.safetensors_files import readable
from forerun_train.drafts.body import DFlashBody
from forerun_train.drafts.chain import ChainDraft, EagleBody, Family, MtpBody
from forerun_train.drafts.config import (
    check_layers,
    dflash_config,
    eagle3_config,
    mtp_config,
    mtp_prefix,
)
from forerun_train.drafts.draft import BlockDraft, Draft, DraftVocabulary, Objective
from forerun_train.drafts.heads import HeadSizes, LMHead, TrainingHead, build_head
from forerun_train.hidden_states import FrozenTarget
from forerun_train.objectives import Mix, PositionWeights
from forerun_train.trainer.options import TrainOptions

KNOWN = "t2d"  # which of the target's tokens a pruned vocabulary has


@dataclass(frozen=True)
class BuiltDraft:
    """A draft, and what its checkpoint says of it."""

    model: Draft
    raw: dict[str, Any]  # config.json
    prefix: str = ""  # of the tensors of the checkpoint

    def stored(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of the checkpoint: parameters under its names, and a pruned vocabulary."""
        named = {self._stored_as(name): value for name, value in parameters.items()}
        vocabulary = self.model.vocabulary
        if vocabulary.ids is None:
            return named
        ids = vocabulary.ids.cpu()
        known = torch.zeros(len(vocabulary.target.head), dtype=torch.bool)
        known[ids] = True
        extra = {OFFSETS: ids - torch.arange(len(ids)), KNOWN: known}
        return {OWN_HEAD: vocabulary.head} | extra | named

    def load(self, folder: Path) -> None:
        """Reads the weights of an exported draft.

        Raises:
            ConfigError: tensors are missing, others are there, or their shapes differ.
        """
        found = _tensors(folder)
        own = {self._stored_as(name): p for name, p in self.model.named_parameters()}
        extra = {OFFSETS, KNOWN, OWN_HEAD} - own.keys()
        differing = sorted(own.keys() ^ (found.keys() - extra))
        if differing:
            raise ConfigError(f"initial_draft {folder}: {differing[0]} is missing or not expected.")
        for name, parameter in own.items():
            if parameter.shape != found[name].shape:
                raise ConfigError(
                    f"initial_draft {folder}: {name} is {list(found[name].shape)}, expected"
                    f" {list(parameter.shape)}."
                )
            parameter.data.copy_(found[name].float())

    def _stored_as(self, name: str) -> str:
        """Body and head have no prefix in checkpoints."""
        return self.prefix + name.partition(".")[2]


def build_draft(
    options: TrainOptions, target: FrozenTarget, mask_token: int, ids: Tensor | None = None
) -> BuiltDraft:
    """The draft with weights of the seed, or of `initial_draft`; on the target's device.

    Args:
        mask_token: id that stands for the unknown tokens of a block.
        ids: [V_d] int64, tokens of a pruned vocabulary; None: all.

    Raises:
        ConfigError: the options do not fit the target.
    """
    torch.manual_seed(options.seed)
    check_layers(options, target.config)
    wanted, has = options.draft_vocab_size, target.config.vocab_size if ids is None else len(ids)
    if options.initial_draft is not None and wanted not in (None, has):
        raise ConfigError(f"initial_draft has draft_vocab_size {has}, this run {wanted}.")
    last, end = -1 if ids is None else int(ids.max()), target.config.vocab_size - 1
    if last > end:
        raise ConfigError(
            f"initial_draft has tokens up to {last}, and the target's vocabulary ends at {end}: it"
            " is the draft of another target."
        )
    request = Request(options, target, mask_token, DraftVocabulary(target, ids))
    built = BUILDERS[options.kind](request)
    if options.initial_draft is not None:
        built.load(Path(options.initial_draft))
    built.model.to(target.device)
    return built


@dataclass(frozen=True)
class Request:
    """What a draft is built of."""

    options: TrainOptions
    target: FrozenTarget
    mask_token: int
    vocabulary: DraftVocabulary

    @property
    def max_positions(self) -> int:
        """Length of the rotary tables."""
        return self.options.seq_len + self.options.block_size

    @property
    def draft_vocab(self) -> int | None:
        """Size of a pruned vocabulary."""
        return None if self.vocabulary.ids is None else len(self.vocabulary.ids)

    def objective(self, head: TrainingHead) -> Objective:
        """What the options say, or the head's own."""
        options = self.options
        given = options.ce_weight, options.kl_weight, options.l1_weight
        mix = Mix(*(weight or 0.0 for weight in given))
        if all(weight is None for weight in given):
            mix = head.default_mix
        decay = head.default_decay if options.decay is None else options.decay
        return Objective(mix, PositionWeights(decay, options.dpace))


def _dflash(request: Request) -> BuiltDraft:
    options = request.options
    if options.initial_draft is None:
        raw = dflash_config(options, request.target.config, request.mask_token, request.draft_vocab)
    else:
        raw = _initial_config(Path(options.initial_draft))
    config = parse_dflash_config(raw, "the draft's config")
    _check_fits(config, options, request)
    positions = options.seq_len + config.block_size
    body = DFlashBody(config, positions, options.activation_checkpointing)
    sizes = HeadSizes(config.hidden_size, config.vocab_size, config.draft_vocab_size)
    head = build_head(config.head, sizes)
    objective = request.objective(head)
    return BuiltDraft(BlockDraft(config, body, head, request.vocabulary, objective), raw)


def _eagle3(request: Request) -> BuiltDraft:
    options, target = request.options, request.target.config
    if options.initial_draft is None:
        raw = eagle3_config(options, target, request.draft_vocab)
    else:
        raw = _initial_config(Path(options.initial_draft))
    config = parse_eagle3_config(raw, "the draft's config")
    layers = config.target_layers(target.num_layers)
    body = EagleBody(config.model, config.aux_hidden_size, request.max_positions)
    body.recompute = options.activation_checkpointing
    head = LMHead(request.vocabulary.head)
    drafts = options.block_size - 1
    return BuiltDraft(
        ChainDraft(body, head, request.vocabulary, request.objective(head), (layers, drafts)), raw
    )


def _mtp(request: Request) -> BuiltDraft:
    options, target = request.options, request.target.config
    raw = mtp_config(request.target.folder)
    body = MtpBody(target, family_of(target), request.max_positions)
    body.recompute = options.activation_checkpointing
    head = TrainingHead()
    chain = (target.num_layers - 1,), options.block_size - 1  # the final state is what it reads
    model = ChainDraft(body, head, request.vocabulary, request.objective(head), chain)
    return BuiltDraft(model, raw, mtp_prefix(target))


def _check_fits(config: DFlashConfig, options: TrainOptions, request: Request) -> None:
    """
    Raises:
        ConfigError: the draft to begin with is of another target, kind or block.
    """
    target, mask = request.target.config, config.mask_token_id
    wanted = {
        "vocab_size": (config.vocab_size, target.vocab_size),
        "target_hidden_size": (config.target_hidden_size, target.hidden_size),
        "num_target_layers": (config.num_target_layers or target.num_layers, target.num_layers),
        "block_size": (config.block_size, options.block_size),
        "draft_vocab_size": (config.draft_vocab_size, len(request.vocabulary.head)),
        "kind": (_kind_of(config), options.kind),
    }
    for name, (has, needs) in wanted.items():
        if has != needs:
            raise ConfigError(f"initial_draft has {name} {shown(has)}, this run {shown(needs)}.")
    if mask is None:
        raise ConfigError("initial_draft names its mask by text; give it as mask_token_id.")


def _kind_of(config: DFlashConfig) -> str:
    """The kind of draft, as `KINDS` has it."""
    names = {MarkovConfig: "dspark", DominoConfig: "domino", SelectorConfig: "dflash2"}
    if config.head is None:
        return "dflash"
    return names.get(type(config.head), config.head.files.name)


def family_of(target: ModelConfig) -> Family:
    """How the attention of the target's layers differs from Llama's.

    Raises:
        ConfigError: its layers differ in more than that.
    """
    own = model_class(target).decoder_layer
    layer = next((each for each in PLAIN_LAYERS if each is own), None)
    if layer is None or target.mlp_bias:
        raise ConfigError(
            f"An MTP layer for {target.architecture} cannot be trained here: its layers are not"
            " those of Llama, Mistral, Qwen2 or Qwen3. Train another kind of draft."
        )
    attention = layer.attention
    return Family(attention.qk_norm(target) is not None, *attention.biases(target))


PLAIN_LAYERS: tuple[type[PreNormDecoderLayer], ...] = (
    LlamaDecoderLayer,
    Qwen2DecoderLayer,
    Qwen3DecoderLayer,
)


def _initial_config(folder: Path) -> dict[str, Any]:
    if not (folder / "config.json").is_file():
        raise ConfigError(f"initial_draft {folder} has no config.json; give an exported draft.")
    raw = read_json(folder / "config.json")
    if "speculators_model_type" in raw:
        raise ConfigError(
            f"initial_draft {folder} has the layout of speculators; give one that was exported"
            " with --layout z-lab."
        )
    return raw


def initial_vocabulary(folder: Path) -> Tensor | None:
    """The tokens of a draft's pruned vocabulary, [V_d] int64; None: it has all.

    Raises:
        ConfigError: it is no draft.
    """
    _initial_config(folder)
    offsets = _tensors(folder).get(OFFSETS)
    return None if offsets is None else offsets + torch.arange(len(offsets))


def _tensors(folder: Path) -> dict[str, Tensor]:
    """
    Raises:
        ConfigError: a file is damaged.
    """
    out: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with readable(file):
            out |= load_file(file)
    return out


BUILDERS: Mapping[str, Callable[[Request], BuiltDraft]] = {
    "dflash": _dflash,
    "dspark": _dflash,
    "dflash2": _dflash,
    "domino": _dflash,
    "eagle3": _eagle3,
    "mtp": _mtp,
}
