"""What an algorithm's class, caps and state per slot must be, and the errors that say so."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forerun.attention.base import LayerMask, Mask
from forerun.config.model_config import load_model_config
from forerun.core.errors import ConfigError
from forerun.kernels.speculation.tree import Tree, unpack_bits
from forerun.kvcache.layouts import ModelLayout
from forerun.speculative.base import (
    Option,
    SlotContext,
    SlotState,
    SpecCaps,
    SpeculativeAlgorithm,
)
from forerun.speculative.check import check_caps, check_class, resolve_caps, slot_tensors
from tests.golden_engine import GOLDEN, golden_llm
from tests.property_examples import examples
from tests.toy_algorithms import TOYS, Toy, register_toys

TARGET = load_model_config(GOLDEN / "target")


def with_member(name: str, value: Any) -> type:
    return type("Toy2", (Toy,), {name: value})


def option(**values: Any) -> type:
    usual: dict[str, Any] = {
        "name": "speculative_toy_depth", "type": int, "default": 3, "help": "How deep"
    }  # fmt: skip
    return with_member("options", (Option(**{**usual, **values}),))


class Nothing(SpeculativeAlgorithm): ...  # type: ignore[abstract]


CLASSES: list[tuple[Any, str]] = [
    (Toy(), "is not a subclass"),
    (int, "is not a subclass"),
    (None, "is not a subclass"),
    (Nothing, "lacks load, propose, resolve; define it"),
    (with_member("resolve", lambda self, config, target, dtype: None), "must be a classmethod"),
    (with_member("resolve", staticmethod(lambda c, t, d: None)), "must be a classmethod"),
    (with_member("options", [*option().options]), "must be a tuple of Option"),  # type: ignore[attr-defined]
    (with_member("options", ("speculative_x",)), "must be a tuple of Option"),
    (with_member("options", option().options * 2), "declares a name twice"),  # type: ignore[attr-defined]
    (option(name="toy_depth"), "must be named speculative_..."),
    (option(name="speculative_"), "must be named speculative_..."),
    (option(name="speculative_Toy"), "must be named speculative_..."),
    (option(name="speculative-toy"), "must be named speculative_..."),
    (option(name="speculative_fallback"), "is a setting of the engine"),
    (option(type=list), "it can be int, float, str or bool"),
    (option(type="int"), "it can be int, float, str or bool"),
    (option(default="3"), "has a wrong default: it must be an integer, got '3'"),
    (option(default=True), "has a wrong default: it must be an integer, got True"),
    (option(type=float, default="0.5"), "has a wrong default: it must be a number"),
    (option(type=float, default=float("nan")), "has a wrong default: it must be finite, got nan"),
    (option(type=bool, default=None), "has a wrong default: it must be true or false, got None"),
    (option(help=3), "has the help 3; it must be text"),
]


@pytest.mark.parametrize(("cls", "says"), CLASSES)
def test_a_class_is_refused(cls: Any, says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_class("TOY2", cls)
    assert says in str(refused.value)
    assert str(refused.value).startswith("Algorithm TOY2: ") and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "cls",
    [
        *TOYS.values(),
        option(default=None),
        option(type=float, default=1),
        option(type=bool, default=False),
        option(type=str, default="auto"),
    ],
)
def test_a_class_is_accepted(cls: Any) -> None:
    assert check_class("TOY2", cls) is cls


KV = ModelLayout.dense(num_layers=2, num_kv_heads=2, head_dim=8, dtype=torch.float32)
TWO = (LayerMask(), LayerMask(Mask.BLOCK))
DRAFT: dict[str, Any] = {"draft_kv": KV, "draft_heads": 4, "draft_attention": TWO}
NEED_KV = "draft_heads, draft_attention and draft_sinks need draft_kv"
CAPS: list[tuple[dict[str, Any], str]] = [
    ({"num_drafts": -1}, "num_drafts must be 0 to"),
    ({"num_drafts": 2.0}, "num_drafts must be 0 to"),
    ({"num_drafts": None}, "num_drafts must be 0 to"),
    ({"num_drafts": 10**6, "kv_reserve": 10**7}, "num_drafts must be 0 to"),
    ({"num_drafts": 5, "kv_reserve": 5}, "kv_reserve must be num_drafts + 1 = 6 or more, got 5"),
    ({"kv_reserve": 0}, "kv_reserve must be num_drafts + 1 = 1 or more, got 0"),
    ({"kv_reserve": "many"}, "kv_reserve must be num_drafts + 1"),
    ({"kv_reserve": 10**9}, f"kv_reserve must be {TARGET.max_position} or less"),
    ({"prefix_lookahead": 1.5}, "prefix_lookahead must be 0 or more, got 1.5"),
    ({"prefix_lookahead": -1}, "prefix_lookahead must be 0 or more, got -1"),
    ({"verify_mask": Mask.BLOCK}, "verify_mask must be"),
    ({"verify_mask": "custom"}, "verify_mask must be"),
    ({"verify_mask": Mask.CUSTOM}, "a tree has 1 to 255 drafts, got num_drafts 0"),
    ({"verify_mask": Mask.CUSTOM, "num_drafts": 256, "kv_reserve": 257}, "1 to 255 drafts"),
    ({"num_drafts": 3, "kv_reserve": 4, "tree_depth": 2}, "tree_depth is for trees"),
    ({"target_layers": 3}, "a value of the wrong type"),
    ({"target_layers": ("last",)}, "a value of the wrong type"),
    ({"target_layers": (0, TARGET.num_layers)}, f"names layer {TARGET.num_layers}; the target has"),
    ({"target_layers": (-1,)}, "names layer -1"),
    ({"draft_heads": 4}, NEED_KV),
    ({"draft_attention": TWO}, NEED_KV),
    ({"draft_sinks": True}, NEED_KV),
    ({"draft_trees": True}, "draft_trees needs draft_kv"),
    (
        {"draft_trees": True, "reads_target_kv": True, "draft_heads": 1},
        "draft_trees needs draft_kv",
    ),
    ({**DRAFT, "draft_kv": "auto"}, "draft_kv must be a ModelLayout"),
    ({**DRAFT, "draft_kv": ModelLayout(())}, "draft_kv must be a ModelLayout with K/V"),
    ({**DRAFT, "draft_heads": 0}, "draft_heads must be a multiple"),
    ({**DRAFT, "draft_heads": 3}, "draft_heads must be a multiple"),
    ({**DRAFT, "draft_heads": None}, "a value of the wrong type"),
    ({**DRAFT, "draft_attention": TWO[:1]}, "1 masks for draft_kv's 2 layers"),
    ({**DRAFT, "draft_attention": (Mask.CAUSAL,) * 2}, "takes LayerMasks of CAUSAL or BLOCK"),
    ({**DRAFT, "draft_attention": (LayerMask(Mask.CUSTOM),) * 2}, "takes LayerMasks of CAUSAL"),
]


@pytest.mark.parametrize(("values", "says"), CAPS)
def test_caps_are_refused(values: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_caps("Toy", SpecCaps(**values), TARGET)
    assert says in str(refused.value) and str(refused.value).startswith("Toy.resolve: ")


@pytest.mark.parametrize(
    "values",
    [
        {},
        DRAFT,
        {"num_drafts": 255, "kv_reserve": 256, "verify_mask": Mask.CUSTOM},
        {"num_drafts": 70, "kv_reserve": 80, "flexible": True, "prefix_lookahead": 1},
        {"target_layers": (0, TARGET.num_layers - 1)},
    ],
)
def test_caps_are_accepted(values: dict[str, Any]) -> None:
    check_caps("Toy", SpecCaps(**values), TARGET)


def test_what_resolve_returns_must_be_caps() -> None:
    with pytest.raises(ConfigError, match=r"Toy\.resolve must return SpecCaps, got None"):
        check_caps("Toy", None, TARGET)


class Failing(Toy):
    error: ClassVar[Exception] = ZeroDivisionError("oops")

    @classmethod
    def resolve(cls, config: Any, target: Any, dtype: Any) -> SpecCaps:
        raise cls.error


def test_a_failing_resolve_is_a_one_line_error(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments: Any = (None, TARGET, torch.float32)
    with pytest.raises(ConfigError, match=r"Failing\.resolve failed: ZeroDivisionError: oops"):
        resolve_caps(Failing(), *arguments)
    own = ConfigError("Set it to 3.")
    monkeypatch.setattr(Failing, "error", own)
    with pytest.raises(ConfigError) as kept:
        resolve_caps(Failing(), *arguments)
    assert kept.value is own


def test_a_method_that_compares_row_layouts_is_needed() -> None:
    caps = replace(Toy.caps, other_row_layout="speculative_draft_layout fill-in")
    arguments: Any = (None, TARGET, torch.float32)
    with pytest.raises(ConfigError, match="other_row_layout needs a method propose_row_layouts"):
        resolve_caps(with_member("caps", caps)(), *arguments)
    compares = type("Both", (with_member("caps", caps),), {"propose_row_layouts": Toy.propose})
    assert resolve_caps(compares(), *arguments) is caps


@pytest.mark.parametrize(
    "method", ["__init__", "load", "create_future_map", "supports_target_verify_for_draft"]
)
@pytest.mark.parametrize("error", [KeyError("phrase"), SystemExit(3)])
def test_a_failing_start_is_a_one_line_error(
    method: str, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: Toy, *context: Any) -> Any:
        raise error

    register_toys()
    monkeypatch.setattr(TOYS["TOY-LEARNER"], method, fails)
    with pytest.raises(ConfigError) as refused:
        golden_llm("TOY-LEARNER")
    where = "Learner" if method == "__init__" else f"Learner.{method}"
    assert str(refused.value).startswith(f"{where} failed: {type(error).__name__}: {error}. Report")
    assert refused.value.__cause__ is error


def test_lack_of_memory_at_start_says_what_to_change(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: Toy, context: Any) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    register_toys()
    monkeypatch.setattr(TOYS["TOY-LEARNER"], "load", fails)
    with pytest.raises(ConfigError, match="cpu ran out of memory for the weights: "):
        golden_llm("TOY-LEARNER")


CONTEXT = SlotContext(5, 16, 64, torch.device("cpu"))


@pytest.mark.parametrize(
    ("state", "says"),
    [
        ({"x": torch.zeros(5)}, "must return a SlotState"),
        ({"x": torch.zeros(5, 99)}, "must return a SlotState"),
        (SlotState([torch.zeros(5)]), "SlotState takes a dictionary of names and tensors"),  # type: ignore[arg-type]
        (SlotState({"x": torch.zeros(4, 2)}), r"'x' must be a dense tensor \[5, ...\] .* \[4, 2\]"),
        (SlotState({"x": torch.zeros(())}), r"'x' must be a dense tensor \[5, ...\] .* got \[\] "),
        (SlotState({"x": [0] * 5}), "'x' must be a dense tensor .* got list"),  # type: ignore[dict-item]
        (SlotState({"x": torch.zeros(5, device="meta")}), "on cpu, got .* on meta"),
        (SlotState({"x": torch.zeros(5).to_sparse()}), "got .* torch.sparse_coo"),
    ],
)
def test_state_per_slot_is_refused(state: Any, says: str) -> None:
    algorithm = with_member("create_future_map", lambda self, ctx: state)()
    with pytest.raises(ConfigError, match=says) as refused:
        slot_tensors(algorithm, CONTEXT)
    assert "\n" not in str(refused.value)


def test_state_per_slot_is_accepted() -> None:
    state = SlotState({"x": torch.zeros(5), "y": torch.zeros(5, 3, dtype=torch.int64)})
    algorithm = with_member("create_future_map", lambda self, ctx: state)()
    assert slot_tensors(algorithm, CONTEXT) is state.tensors
    assert CONTEXT.padding_slot == 4


def test_the_engine_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    register_toys()
    for caps, says in (
        ({"kv_reserve": 1}, "kv_reserve must be"),
        ({"draft_heads": 1}, "need draft_kv"),
    ):
        monkeypatch.setattr(TOYS["TOY-LEARNER"], "caps", replace(Toy.caps, **caps))
        with pytest.raises(ConfigError, match=says):
            golden_llm("TOY-LEARNER")
    monkeypatch.undo()
    state = SlotState({"x": torch.zeros(1)})
    monkeypatch.setattr(TOYS["TOY-LEARNER"], "create_future_map", lambda self, ctx: state)
    with pytest.raises(ConfigError, match="must be a dense tensor"):
        golden_llm("TOY-LEARNER")


@examples(20)
@given(st.integers(1, 255))
def test_a_tree_of_any_size_allowed_has_bits(drafts: int) -> None:
    chain = torch.arange(drafts).unsqueeze(0)
    bits = unpack_bits(Tree.from_parents(chain).ancestors[0], drafts + 1)
    assert torch.equal(bits, torch.ones(drafts + 1, drafts + 1).tril().bool())
