"""The settings of a training run: one dataclass, presets, and what cannot be combined."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, Field, asdict, dataclass, field, fields
from typing import Any

from forerun.core.errors import ConfigError, shown

KINDS = ("dflash", "dspark", "dflash2", "domino", "eagle3", "mtp")


def setting(default: Any, help: str) -> Any:
    """A field with its default and what it is, for the command line; MISSING: it must be given."""
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Everything that `forerun train` can be told. Every field is a keyword and a flag."""

    kind: str = setting(MISSING, f"what to train: {', '.join(KINDS)}")
    target: str = setting(MISSING, "the target: a model folder, a GGUF file, or org/name")
    data: str = setting(MISSING, "JSONL file or folder of conversations or texts")
    output: str = setting(MISSING, "folder for checkpoints, logs and the exported draft")
    resume: bool = setting(False, "continue the run in the output folder")
    # The draft.
    num_layers: int = setting(3, "layers of the draft (dspark, dflash, ...)")
    block_size: int = setting(8, "tokens of a block, the anchor among them")
    intermediate_size: int | None = setting(None, "of the draft's MLPs (default: the target's)")
    target_layer_ids: tuple[int, ...] | None = setting(
        None, "layers of the target that the draft reads (default: spread evenly)"
    )
    mask_token_id: int | None = setting(None, "token that stands for the unknown ones of a block")
    draft_vocab_size: int | None = setting(
        None, "keep only the most frequent tokens of the data in the draft's LM head"
    )
    layout: str = setting("z-lab", "of the exported files: z-lab or speculators (vLLM's)")
    initial_draft: str | None = setting(None, "start from the weights of this exported draft")
    head_rank: int = setting(256, "rank of a DSpark or DFlash2 head, sizes of a Domino head")
    markov_head_type: str = setting("vanilla", "DSpark: vanilla, gated or rnn")
    selector_top_k: int = setting(16, "DFlash2: candidates of each row")
    # The data.
    template: str | None = setting(None, "chat template: a file (default: the target's own)")
    seq_len: int = setting(1024, "tokens of a packed sequence")
    batch_size: int = setting(8, "sequences of a step, over all GPUs")
    micro_batch: int | None = setting(
        None, "sequences at a time on each GPU (default: all of its part of a batch)"
    )
    max_errors: int = setting(0, "lines of the data that cannot be used and are skipped")
    validation_share: float = setting(0.02, "part of the records that is kept for validation")
    validation_batches: int = setting(4, "batches of validation data that are scored each time")
    hidden_states: str | None = setting(
        None, "folder where the target's hidden states are stored once, and then read"
    )
    stored_batches: int | None = setting(
        None, "batches to store there, read in turn (default: one for every step)"
    )
    # The objective.
    anchors: int = setting(128, "blocks of each sequence in a step, at random places")
    ce_weight: float | None = setting(None, "weight of cross-entropy to the text")
    kl_weight: float | None = setting(None, "weight of the KL divergence from the target")
    l1_weight: float | None = setting(
        None, "weight of |p_draft - p_target|, twice the total variation (all three: by kind)"
    )
    decay: float | None = setting(None, "γ of position weights e^(-k/γ) (default: by kind)")
    dpace: float = setting(0.0, "above 0: α of D-PACE, which replaces the fixed decay")
    # The run.
    max_steps: int = setting(1000, "optimizer steps")
    max_minutes: float | None = setting(None, "end after so long, with the schedule fitted to it")
    learning_rate: float = setting(6e-4, "at the end of warm-up")
    final_learning_rate: float = setting(0.05, "at the end, as a part of the highest")
    warmup: float = setting(0.04, "part of the run with warm-up")
    weight_decay: float = setting(0.0, "of matrices")
    clip: float = setting(1.0, "largest norm of the gradient")
    optimizer: str = setting("adamw", "adamw or muon")
    seed: int = setting(0, "of weights, anchors and the order of the data")
    device: str = setting("auto", "auto, cuda or cpu")
    dtype: str = setting("auto", "of the computation: auto, bfloat16 or float32")
    compile: bool | None = setting(None, "torch.compile (default: on a GPU)")
    activation_checkpointing: bool = setting(False, "recompute layers to save memory")
    validate_every: int = setting(200, "steps between validations")
    save_every: int = setting(200, "steps between checkpoints")
    log_every: int = setting(20, "steps between log lines")
    logs: tuple[str, ...] = setting(("jsonl",), "jsonl, tensorboard")
    view: bool | None = setting(None, "live view (default: in a terminal)")

    @classmethod
    def of(cls, preset: str | None, given: Mapping[str, Any]) -> TrainOptions:
        """The options of a preset, changed by what a user has given.

        Raises:
            ConfigError: an unknown preset, a setting that is missing, or one out of range.
        """
        if preset is not None and preset not in PRESETS:
            raise ConfigError(f"preset {shown(preset)} is not known; one of: {', '.join(PRESETS)}.")
        values = {**(PRESETS[preset] if preset is not None else {}), **given}
        missing = [each.name for each in fields(cls) if _required(each) and each.name not in values]
        if missing:
            raise ConfigError(f"{', '.join(missing)} must be given.")
        options = cls(**values)
        options.check()
        return options

    def check(self) -> None:
        """
        Raises:
            ConfigError: a value is out of range, or two do not go together.
        """
        for name, allowed in CHOICES.items():
            value = getattr(self, name)
            if value not in allowed:
                raise ConfigError(f"{name} {shown(value)} is not known; one of: {_list(allowed)}.")
        unknown = set(self.logs) - set(LOGS)
        if unknown:
            raise ConfigError(f"logs {shown(min(unknown))} is not known; one of: {_list(LOGS)}.")
        for name, (least, most) in RANGES.items():
            value = getattr(self, name)
            if value is not None and not (least <= value <= most and math.isfinite(value)):
                limits = f"at least {least}" + (f", at most {most}" if most < MOST else "")
                raise ConfigError(f"{name} must be {limits}, got {value}.")
        if not 0 < self.validation_share < 1:
            raise ConfigError(
                f"validation_share must lie between 0 and 1, got {self.validation_share}."
            )
        if self.stored_batches is not None and self.hidden_states is None:
            raise ConfigError("stored_batches needs hidden_states, the folder to store them in.")
        if self.block_size > self.seq_len:
            raise ConfigError(
                f"block_size {self.block_size} is larger than seq_len {self.seq_len}: no block"
                " fits. Lower block_size or raise seq_len."
            )
        weights = self.ce_weight, self.kl_weight, self.l1_weight
        if any(weight is not None for weight in weights) and not any(weights):
            raise ConfigError("ce_weight, kl_weight and l1_weight are all 0; give one a weight.")

    def settings(self) -> dict[str, Any]:
        """What decides the course of a run, for checkpoints; values are as JSON has them."""
        values = {name: value for name, value in asdict(self).items() if name not in FREE}
        return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}


def _required(each: Field[Any]) -> bool:
    return each.default is MISSING and each.default_factory is MISSING


def _list(names: tuple[str, ...]) -> str:
    return ", ".join(names)


LOGS = ("jsonl", "tensorboard")
CHOICES: Mapping[str, tuple[str, ...]] = {
    "kind": KINDS,
    "layout": ("z-lab", "speculators"),
    "optimizer": ("adamw", "muon"),
    "device": ("auto", "cuda", "cpu"),
    "dtype": ("auto", "bfloat16", "float32"),
    "markov_head_type": ("vanilla", "gated", "rnn"),
}
MOST = math.inf
RANGES: Mapping[str, tuple[float, float]] = {  # the least and the most
    "num_layers": (1, MOST), "block_size": (2, MOST), "seq_len": (16, MOST),
    "batch_size": (1, MOST), "anchors": (1, MOST), "max_steps": (1, MOST),
    "micro_batch": (1, MOST), "stored_batches": (1, MOST), "head_rank": (1, MOST),
    "selector_top_k": (1, MOST), "intermediate_size": (1, MOST), "draft_vocab_size": (16, MOST),
    "mask_token_id": (0, MOST), "max_errors": (0, MOST), "validation_batches": (1, MOST),
    "validate_every": (1, MOST), "save_every": (1, MOST), "log_every": (1, MOST),
    "max_minutes": (0.01, MOST), "learning_rate": (0, MOST), "final_learning_rate": (0, 1),
    "warmup": (0, 1), "weight_decay": (0, MOST), "clip": (0, MOST), "decay": (0.01, MOST),
    "dpace": (0, 1), "ce_weight": (0, MOST), "kl_weight": (0, MOST), "l1_weight": (0, MOST),
    "seed": (0, 2**32 - 1),
}  # fmt: skip

# A resumed run may differ in these: they change where it runs and what it shows, not its course.
FREE = (
    "output", "resume", "log_every", "validate_every", "save_every", "logs", "view",
    "micro_batch", "activation_checkpointing", "compile", "max_errors",
)  # fmt: skip

# What these name is compared instead of the names (`checkpoint.check_same_contents`).
BY_CONTENTS = ("target", "data", "template")

PRESETS: Mapping[str, Mapping[str, Any]] = {
    # Minutes on a CPU, with the bundled target.
    "smoke": {
        "num_layers": 1, "block_size": 6, "seq_len": 256, "batch_size": 4, "anchors": 24,
        "max_steps": 150, "learning_rate": 0.01, "optimizer": "muon", "validate_every": 50,
        "save_every": 50, "log_every": 10, "validation_batches": 2, "validation_share": 0.1,
        "dpace": 0.5, "head_rank": 32,
    },
    # A target of 100 to 500 M parameters: about ten minutes of one H100.
    "small": {
        "num_layers": 3, "block_size": 8, "seq_len": 1024, "batch_size": 32, "anchors": 256,
        "max_steps": 6000, "max_minutes": 10.0, "learning_rate": 3e-3, "dpace": 0.5,
        "optimizer": "muon", "validate_every": 500, "save_every": 500, "validation_batches": 4,
    },
    # A target of about 8 B parameters; anchors and lengths of published drafts.
    "base": {
        "num_layers": 5, "block_size": 16, "seq_len": 4096, "batch_size": 64, "anchors": 512,
        "max_steps": 20000, "learning_rate": 1e-3, "optimizer": "muon", "dpace": 0.5,
        "activation_checkpointing": True, "validate_every": 500, "save_every": 500,
    },
}  # fmt: skip
