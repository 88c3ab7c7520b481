"""Any causal LM that transformers has (`model_impl transformers`): its modules, our attention.

transformers calls attention through a table of functions (`AttentionInterface`); ours writes K/V to
the pools and attends over pages. Everything else runs as transformers wrote it, operation by
operation. What the layers keep and how they attend is learnt from a forward on the meta device.
"""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from forerun.attention.base import AttentionContext, AttentionSpec, LayerMask, Mask
from forerun.config.json_files import read_json
from forerun.config.model_config import ModelConfig, parse_model_config
from forerun.core.errors import ConfigError, first_line
from forerun.kernels.sampling.argmax import argmax
from forerun.kvcache.layouts import DenseKV, ModelLayout
from forerun.layers.communication import WeightPlacement
from forerun.models.base import CausalLM, DecoderLayer

# RoPE that depends on the length of the longest request in the batch.
BATCH_DEPENDENT_ROPE = ("dynamic", "longrope", "su")


def load_transformers_config(folder: Path) -> ModelConfig:
    """Reads any config that transformers reads; `raw` is transformers' own form of it.

    Raises:
        ConfigError: transformers does not know it, or Forerun cannot serve such models.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    raw = read_json(folder / "config.json")
    kind = str(raw.get("model_type"))
    if kind not in CONFIG_MAPPING:  # code that a checkpoint brings is never run
        raise ConfigError(f"{folder}: transformers has no model_type {kind!r}; update it.")
    try:
        hf = CONFIG_MAPPING[kind].from_pretrained(folder, local_files_only=True)
    except Exception as error:  # noqa: BLE001  each of its configs has checks, and errors, of its own
        raise ConfigError(
            f"{folder}: transformers cannot read config.json: {first_line(error)}"
        ) from None
    whole: dict[str, Any] = hf.to_dict()
    whole.pop("auto_map", None)

    def value(key: str) -> Any:
        """Returns what has this name in this family."""
        return whole.get(hf.attribute_map.get(key, key))

    layers, hidden = value("num_hidden_layers"), value("hidden_size")
    if layers is None or hidden is None or whole.get("text_config"):
        raise ConfigError(
            f"{folder}: {hf.model_type} is no plain language model (num_hidden_layers and"
            " hidden_size of its own), so model_impl transformers does not serve it."
        )
    common = {
        "architectures": raw.get("architectures") or [hf.model_type],
        "hidden_size": hidden,
        "intermediate_size": value("intermediate_size") or 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": value("num_attention_heads"),
        "num_key_value_heads": value("num_key_value_heads"),
        "vocab_size": value("vocab_size"),
        "max_position_embeddings": value("max_position_embeddings"),
        "dtype": raw.get("dtype") or raw.get("torch_dtype"),
    }
    _check_config(whole, hf.is_encoder_decoder)
    config = parse_model_config(common, where=str(folder))
    return replace(config, raw=whole)


def _check_config(raw: dict[str, Any], is_encoder_decoder: bool) -> None:
    """Refuses what would be computed wrongly over paged K/V."""
    ropes = raw.get("rope_parameters") or {}
    nested = [spec for spec in ropes.values() if isinstance(spec, dict)] or [ropes]
    kinds = {str(spec.get("rope_type", "default")) for spec in nested}
    types = set(raw.get("layer_types") or ())
    reasons = (
        (is_encoder_decoder, "it has an encoder"),
        (raw.get("quantization_config"), "its weights are quantized"),
        (kinds & set(BATCH_DEPENDENT_ROPE), f"its RoPE ({', '.join(kinds)}) depends on the batch"),
        (
            types - {"full_attention", "sliding_attention"},
            f"it has layers of type {', '.join(sorted(types))}",
        ),
    )
    for refused, reason in reasons:
        if refused:
            raise ConfigError(
                f"model_impl transformers does not serve {raw.get('model_type')}: {reason}."
            )


Options = dict[str, Any]  # what a layer hands to its attention function besides q, k and v


@dataclass(frozen=True)
class LayerCall:
    """How one layer calls attention."""

    q_heads: int
    layout: DenseKV
    scale: float
    window: int | None
    softcap: float | None
    sinks: bool


class _Calls:
    """What a forward's attention calls go to."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: Options) -> Tensor:
        """q [T, Hq, D], k, v [T, Hkv, D] of a layer -> [T, Hq, D]."""
        raise NotImplementedError


class _Recorded(_Calls):
    """The calls of a forward on the meta device."""

    def __init__(self) -> None:
        self.layers: dict[int, LayerCall] = {}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: Options) -> Tensor:
        if layer in self.layers:
            raise ConfigError(f"model_impl transformers: layer {layer} attends twice.")
        if k.shape != v.shape or q.shape[2] != k.shape[2]:
            raise ConfigError(
                "model_impl transformers needs queries, keys and values of one head dim; these are"
                f" {q.shape[2]}, {k.shape[2]} and {v.shape[2]}."
            )
        if options.get("attention_mask") is not None or options.get("is_causal") is False:
            raise ConfigError("model_impl transformers: attention is not causal, or has a bias.")
        scale, window = options.get("scaling"), options.get("sliding_window")
        self.layers[layer] = LayerCall(
            q_heads=q.shape[1],
            layout=DenseKV(k.shape[1], k.shape[2], k.dtype),
            scale=q.shape[2] ** -0.5 if scale is None else float(scale),
            window=None if not window else int(window),
            softcap=options.get("softcap"),
            sinks=options.get("s_aux") is not None,
        )
        return q.new_empty(q.shape)


class _Paged(_Calls):
    """Attends over paged K/V."""

    def __init__(self, ctx: AttentionContext, specs: dict[int, AttentionSpec]) -> None:
        self._ctx, self._specs = ctx, specs

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: Options) -> Tensor:
        backend, plan, spec = self._ctx.backend, self._ctx.plan, self._specs[layer]
        if options.get("s_aux") is not None and spec.sinks is None:
            spec = replace(spec, sinks=options["s_aux"].float())
            self._specs[layer] = spec
        backend.write(plan, layer, k.contiguous(), v.contiguous())
        return backend.attend(plan, layer, spec, q.contiguous())


class _Interface:
    """The attention function of one model, in transformers' table under a name of its own."""

    def __init__(self) -> None:
        from transformers import AttentionInterface

        self.calls: _Calls | None = None  # of the forward that is running
        self.name = f"forerun-{next(_NUMBERS)}"
        AttentionInterface.register(self.name, self)

    def __call__(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """q, k, v [1, heads, T, D] -> [1, T, Hq, D]."""
        assert self.calls is not None, "attention outside of a forward"
        options = {"is_causal": vars(module).get("is_causal"), **kwargs}
        options["attention_mask"] = args[0] if args else kwargs.get("attention_mask")
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        out = self.calls.attend(module.layer_idx, q, k, v, options)
        return out.contiguous().unsqueeze(0), None


_NUMBERS = itertools.count()
_NOTHING = torch.empty(0)  # captured yet


class _Output:
    """What a base model returns, as far as logits are made of it: the rest is None."""

    def __init__(self, last_hidden_state: Tensor) -> None:
        self.last_hidden_state = last_hidden_state

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: int) -> Tensor | None:
        return None if index else self.last_hidden_state


class _Given(nn.Module):
    """Stands for the layers where logits are made of hidden states that are there already."""

    def forward(self, *args: object, inputs_embeds: Tensor, **kwargs: object) -> _Output:
        return _Output(inputs_embeds)


class TransformersForCausalLM(CausalLM):
    """Built on the meta device; `load` gives it weights.

    One sequence is what transformers sees: the tokens of all requests, with their own positions.
    Only attention reads other tokens, and that is ours.
    """

    decoder_layer: ClassVar[type[DecoderLayer]]  # none of ours

    def __init__(self, config: ModelConfig, place: WeightPlacement, max_positions: int) -> None:
        del max_positions  # transformers computes angles of positions in every forward
        self.config = config
        self._attention = _Interface()
        self._captured: dict[int, Tensor] = {}  # by layer, those that the forward returns
        self._use(self._on_meta(place.dtype))
        self._calls = self._learn()
        self.layer_masks = tuple(LayerMask(Mask.CAUSAL, call.window) for call in self._calls)
        self.has_attention_sinks = any(call.sinks for call in self._calls)
        self.has_logit_softcap = any(call.softcap is not None for call in self._calls)
        pairs = zip(self.layer_masks, self._calls, strict=True)
        specs = [AttentionSpec(mask, call.scale, call.softcap) for mask, call in pairs]
        self._specs = dict(enumerate(specs))

    @property
    def _name(self) -> str:
        return self.config.architecture

    def load(self, folder: Path, place: WeightPlacement) -> None:
        """Weights, read as transformers reads them.

        Raises:
            ConfigError: it cannot.
        """
        from transformers import AutoModelForCausalLM

        try:
            hf: Any = AutoModelForCausalLM.from_pretrained(
                folder,
                config=self._hf.config,
                dtype=place.dtype,
                attn_implementation=self._attention.name,
                use_safetensors=True,
                local_files_only=True,
            )
        except (OSError, ValueError, RuntimeError) as error:
            raise ConfigError(f"transformers cannot load {folder}: {first_line(error)}") from None
        self._use(hf.to(place.device).eval().requires_grad_(False))

    def weights(self, prefix: str = "") -> dict[str, Tensor]:
        return {f"{prefix}{name}": weight.data for name, weight in self._hf.named_parameters()}

    def kv_layout(self, kv_dtype: torch.dtype) -> ModelLayout:
        return ModelLayout(tuple(replace(call.layout, dtype=kv_dtype) for call in self._calls))

    def embed(self, input_ids: Tensor) -> Tensor:
        embedded: Tensor = self._hf.get_input_embeddings()(input_ids)
        return embedded

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        ctx: AttentionContext,
        capture_layers: tuple[int, ...] = (),
        rows: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        self._captured = dict.fromkeys(capture_layers, _NOTHING)
        hidden_states = self._run(input_ids, positions, _Paged(ctx, self._specs))
        if rows is not None:
            hidden_states = hidden_states.index_select(0, rows)
        captured = [self._captured[layer] for layer in capture_layers]
        return hidden_states, torch.cat(captured, 1) if captured else None

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        logits: Tensor = self._head(inputs_embeds=hidden_states.unsqueeze(0)).logits[0]
        return logits

    def compute_argmax(self, hidden_states: Tensor) -> Tensor:
        return argmax(self.compute_logits(hidden_states))

    def _on_meta(self, dtype: torch.dtype) -> Any:
        """Builds it without weights."""
        from transformers import AutoConfig, AutoModelForCausalLM

        try:
            with torch.device("meta"):
                hf = AutoModelForCausalLM.from_config(
                    AutoConfig.for_model(**self.config.raw),
                    dtype=dtype,
                    attn_implementation=self._attention.name,
                    experts_implementation="batched_mm",  # no loop that depends on data
                )
        except (ValueError, KeyError, ImportError) as error:
            raise ConfigError(
                f"transformers cannot build {self._name}: {first_line(error)}"
            ) from None
        return hf.eval()

    def _use(self, hf: Any) -> None:
        self._hf, self._base = hf, hf.base_model
        if hf._is_stateful:  # beside K/V, such as Falcon-H1's state-space layers
            raise ConfigError(f"model_impl transformers: {self._name} has recurrent state.")
        parameters = inspect.signature(self._base.forward).parameters
        if self._base is hf or "position_ids" not in parameters:
            raise ConfigError(f"model_impl transformers: {self._name} takes no position_ids.")
        # The same model with its layers cut out: what is left makes logits of hidden states.
        self._head = copy.copy(hf)
        self._head._modules = {**hf._modules, hf.base_model_prefix: _Given()}
        for layer, module in enumerate(self._layers()):
            module.register_forward_hook(self._hook(layer))

    def _layers(self) -> Iterator[nn.Module]:
        """The decoder layers, in order.

        Raises:
            ConfigError: they are in no list of their own.
        """
        lists = [m for m in self._base.modules() if isinstance(m, nn.ModuleList)]
        found = [each for each in lists if len(each) == self.config.num_layers]
        if not found:
            raise ConfigError(
                f"model_impl transformers: {self._name} has no list of"
                f" {self.config.num_layers} layers."
            )
        yield from found[0]

    def _hook(self, layer: int) -> Any:
        def keep(module: nn.Module, args: Any, output: Any) -> None:
            if layer in self._captured:
                x = output[0] if isinstance(output, tuple) else output
                self._captured[layer] = x.flatten(0, -2)  # [T, H]

        return keep

    def _run(self, input_ids: Tensor, positions: Tensor, calls: _Calls) -> Tensor:
        """Hidden states [T, H] after the final norm."""
        self._attention.calls = calls
        out = self._base(
            input_ids=input_ids.unsqueeze(0),
            position_ids=positions.long().unsqueeze(0),
            use_cache=False,
        )
        self._attention.calls = None
        hidden_states: Tensor = out.last_hidden_state
        return hidden_states.flatten(0, -2)

    def _learn(self) -> list[LayerCall]:
        """Raises ConfigError: a layer does not attend through the interface."""
        calls, ids = _Recorded(), torch.zeros(2, dtype=torch.int64, device="meta")
        with torch.inference_mode():
            hidden_states = self._run(ids, ids, calls)
            try:
                self.compute_logits(hidden_states)
            except (AttributeError, TypeError) as error:
                raise ConfigError(
                    f"model_impl transformers: {self._name} does not make its logits of its base"
                    f" model's output ({error})."
                ) from None
        layers = self.config.num_layers
        if sorted(calls.layers) != list(range(layers)):
            raise ConfigError(
                f"model_impl transformers: {len(calls.layers)} of {layers} layers of {self._name}"
                " attend through transformers' attention interface; all must."
            )
        learnt = [calls.layers[i] for i in range(layers)]
        _check_windows(self.config.raw, learnt)
        return learnt


def _check_windows(raw: Any, calls: list[LayerCall]) -> None:
    """Refuses models whose windows stand in masks alone, which are not made."""
    types = raw.get("layer_types") or [None] * len(calls)
    for layer, (kind, call) in enumerate(zip(types, calls, strict=True)):
        if (kind == "sliding_attention") != (call.window is not None) and kind is not None:
            raise ConfigError(
                f"model_impl transformers: layer {layer} is {kind}, and attends with"
                f" {'a' if call.window else 'no'} window."
            )
