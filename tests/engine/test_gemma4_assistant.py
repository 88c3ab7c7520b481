"""Gemma 4's assistant: drafts of every step are those of transformers' modules, and the text is
that of plain decoding."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, Gemma4TextConfig
from transformers.models.gemma4_assistant import Gemma4AssistantConfig, Gemma4AssistantForCausalLM

from forerun import LLM
from forerun.config.engine_config import EngineConfig
from forerun.core.errors import ConfigError
from forerun.core.sampling_params import SamplingParams
from forerun.doctor.draft import explain_draft
from forerun.sampling.noise import gumbel_argmax, seed_key
from tests.engine.test_chain_drafts import alternate_widths, recorded, recorded_drafts
from tests.engine.test_family_targets import config_of, reference
from tests.engine.test_matrix import GREEDY, SEEDED, generate, params
from tests.engine.test_moe_target import SIZES, prompts
from tests.engine.test_tensor_parallel import engine_of
from tests.engine_runs import run_together
from tests.golden_engine import poison_on_release
from tests.models.support import FAMILIES, random_hf, randomised, save

KINDS = ["gemma4", "gemma4-per-layer"]
FORMS = ["plain", "centroids"]
SEED, STEPS = 7, 4
TEXT: dict[str, Any] = {
    **SIZES,
    **{k: FAMILIES["gemma4"][1][k] for k in ("global_head_dim", "sliding_window", "rms_norm_eps")},
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
    "num_kv_shared_layers": 3,
}
# Heads of K/V are the target's.
KV = {"gemma4": {"attention_k_eq_v": True, "num_global_key_value_heads": 1}, "gemma4-per-layer": {}}


@pytest.fixture(scope="module", autouse=True)
def shared_kv() -> Iterator[None]:
    """The last layer of every type of a target hands out its K/V; those of an assistant take it.

    transformers 5.23 hands out nothing where no layers of the target itself share K/V, and refuses
    its own assistant, all of whose layers do.
    """
    modes = getattr(Gemma4TextConfig, "kv_sharing_modes", None)
    if modes is None:
        pytest.skip("the oracle is transformers 5.23 or later")

    def of(config: Gemma4TextConfig) -> list[str | None]:
        if config.num_kv_shared_layers == config.num_hidden_layers:
            return ["reuse"] * config.num_hidden_layers
        if config.num_kv_shared_layers:
            return modes.fget(config)
        last = {kind: i for i, kind in enumerate(config.layer_types)}.values()
        return ["store" if i in last else None for i in range(config.num_hidden_layers)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Gemma4TextConfig, "kv_sharing_modes", property(of))
        yield


def assistant(kind: str, form: str) -> Any:
    """Random weights."""
    ordered = form == "centroids"
    outer = {"num_centroids": 16, "centroid_intermediate_top_k": 3} if ordered else {}
    config = Gemma4AssistantConfig(
        text_config=Gemma4TextConfig(**TEXT, **KV[kind]),
        backbone_hidden_size=SIZES["hidden_size"],
        use_ordered_embeddings=ordered,
        **outer,
    )
    config.text_config._attn_implementation = "eager"
    model = randomised(Gemma4AssistantForCausalLM._from_config(config, dtype=torch.float32).eval())
    if ordered:
        generator = torch.Generator().manual_seed(5)
        tokens = torch.randperm(SIZES["vocab_size"], generator=generator)
        model.masked_embedding.token_ordering.copy_(tokens)
    return model


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, shared_kv: None) -> Path:
    root = tmp_path_factory.mktemp("gemma4")
    for kind in KINDS:
        save(random_hf(config_of(kind)), root / kind)
        for form in FORMS:
            save(assistant(kind, form), root / f"{kind}-{form}")
    return root


def assisted(root: Path, kind: str, form: str, **settings: Any) -> LLM:
    settings = {"speculative_adaptive": False, "skip_tokenizer_init": True, **settings}
    settings = {"device": "cpu", "dtype": "float32", "speculative_num_steps": STEPS, **settings}
    settings.setdefault("speculative_draft_model_path", str(root / f"{kind}-{form}"))
    llm = LLM(root / kind, speculative_algorithm="FROZEN_KV_MTP", **settings)
    poison_on_release(llm)
    return llm


class Reference:
    """Drafts by transformers' modules, over K/V that the target has just computed."""

    def __init__(self, root: Path, kind: str, form: str) -> None:
        load = partial(AutoModelForCausalLM.from_pretrained, attn_implementation="eager")
        self.target: Any = load(root / kind, dtype=torch.float32)
        self.draft = Gemma4AssistantForCausalLM.from_pretrained(
            root / f"{kind}-{form}", dtype=torch.float32, attn_implementation="eager"
        )

    @torch.inference_mode()
    def drafts(self, ids: Tensor, sampled: bool) -> list[int]:
        """Drafts after ids [n], where the target has run on all but the last."""
        out = self.target.model(ids[None, :-1], return_shared_kv_states=True)
        hidden, key = out.last_hidden_state[:, -1:], torch.tensor(seed_key(SEED))
        last, drafts = ids[-1:], []
        for i in range(STEPS):
            embedded = self.target.get_input_embeddings()(last[None])
            step = self.draft(
                inputs_embeds=torch.cat((embedded, hidden), -1),
                position_ids=torch.tensor([[len(ids) - 1]]),
                shared_kv_states=dict(out.shared_kv_states),
            )
            logits, hidden = step.logits[0, -1], step.last_hidden_state
            if self.draft.masked_embedding is not None:  # tokens of other centroids: no logits
                logits = logits.masked_fill(logits == logits.min(), -torch.inf)
            at = torch.tensor(len(ids) + i)
            last = (gumbel_argmax(logits / 0.8, key, at) if sampled else logits.argmax()).view(1)
            drafts.append(int(last))
        return drafts


@pytest.mark.covering(0)
@pytest.mark.parametrize("chunk", [512, 7])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_equal_transformers(
    kind: str, form: str, chunk: int, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step by step, without and with a cached prefix, past the sliding window."""
    want, prompt = Reference(root, kind, form), prompts()[0]
    for sampled in (False, True):
        how = {"temperature": 0.8 * sampled, "sampling_seed": SEED, "max_new_tokens": 24}
        how["ignore_eos"] = True
        with (
            assisted(root, kind, form, chunked_prefill_size=chunk) as llm,
            monkeypatch.context() as m,
        ):
            seen = recorded(llm, m)
            outs = [llm.generate(input_ids=prompt, sampling_params=how) for _ in ("cold", "warm")]
        assert outs[1].meta_info["cached_tokens"] > 16
        text, half = torch.tensor(prompt + outs[0].output_ids), len(seen) // 2
        assert seen[half:] == seen[:half] and half > 4
        for start, tokens in seen[:half]:
            assert tokens == want.drafts(text[: start + 1], sampled), start
        assert len({tuple(tokens) for _, tokens in seen}) > 3


@pytest.mark.exhaustive
@pytest.mark.covering(0, 2)
@pytest.mark.parametrize("overlap_depth", [0, 1], ids=["sync", "overlap"])
@pytest.mark.parametrize("tight", [False, True], ids=["roomy", "tight"])
@pytest.mark.parametrize(("page_size", "chunk"), [(1, 4), (16, 512)])
@pytest.mark.parametrize("form", FORMS)
def test_output_equals_plain_decoding(
    root: Path, form: str, page_size: int, chunk: int, tight: bool, overlap_depth: int
) -> None:
    settings: dict[str, Any] = {"page_size": page_size, "chunked_prefill_size": chunk}
    if tight:
        settings["max_total_tokens"] = 128
    with assisted(root, "gemma4", form, overlap_depth=overlap_depth, **settings) as llm:
        for sampled, chosen in enumerate((GREEDY, SEEDED)):
            kinds = [params(chosen, i) for i in range(len(prompts()))]
            llm.engine.flush_cache()
            for _ in ("cold", "prefix hits"):
                got = generate(llm, prompts(), kinds, tight)
                assert [o[0] for o in got] == reference(root, "gemma4", bool(sampled))
        llm.engine.check()


@pytest.mark.exhaustive
def test_the_width_does_not_change_the_drafts(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After plain steps, whose hidden states are deferred."""
    drafts: list[dict[int, list[int]]] = []
    how = {"temperature": 0.0, "max_new_tokens": 48, "ignore_eos": True}
    for adaptive in (False, True):
        own = {"speculative_num_steps": 5, "speculative_adaptive": adaptive}
        own |= {"disable_cuda_graph": True}
        with assisted(root, "gemma4", "plain", **own) as llm:
            if adaptive:
                alternate_widths(llm, monkeypatch)
            seen = recorded(llm, monkeypatch)
            llm.generate(input_ids=prompts()[0], sampling_params=how)
            drafts.append(dict(seen))
    full, some = drafts
    common = full.keys() & some.keys()
    assert len(common) > 3 and {len(some[start]) for start in common} == {1, 3, 5}
    assert all(some[start] == full[start][: len(some[start])] for start in common)


@pytest.mark.parametrize("form", FORMS)
def test_drafts_of_two_ranks(root: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks divide the draft as they do the target's K/V, whose heads may be fewer."""
    draft = str(root / f"gemma4-{form}")
    own = {"speculative_algorithm": "FROZEN_KV_MTP", "speculative_draft_model_path": draft}
    shared = {"dtype": "float32", "device": "cpu", "skip_tokenizer_init": True, "page_size": 16}
    shared |= {
        "disable_cuda_graph": True,
        "model_path": str(root / "gemma4"),
        "speculative_adaptive": False,
        **own,
    }
    options = {"speculative_num_steps": STEPS}
    asked = {"temperature": 0.8, "sampling_seed": SEED, "max_new_tokens": 24, "ignore_eos": True}
    found = []
    for ranks in (1, 2):
        settings = EngineConfig.of({**shared, "tp_size": ranks}, options)
        with engine_of(settings) as engine:
            executor: Any = getattr(engine.executor, "executors", [engine.executor])[0]
            drafts = recorded_drafts(executor.step, monkeypatch)
            requests = []
            for prompt in prompts()[:2]:
                requests.append(engine.make_request(prompt, SamplingParams.of(asked)))
                run_together(engine, requests[-1:])
        found.append((drafts, [request.output for request in requests]))
    assert found[0] == found[1]
    assert len(found[0][0]) > 6


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"tp_size": 2, "speculative_draft_tp_size": 1}, "reads the target's K/V, which tp_size 2"),
        ({"tp_size": 4}, "speculative_draft_tp_size 4: the draft .* does not divide .* heads, 2;"),
    ],
)
def test_ranks_that_do_not_fit_are_refused(
    settings: dict[str, Any], words: str, root: Path, tmp_path: Path
) -> None:
    config = json.loads((root / "gemma4-plain" / "config.json").read_text())
    config["text_config"]["num_attention_heads"] = 2
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=words):
        assisted(root, "gemma4", "plain", speculative_draft_model_path=str(tmp_path), **settings)


HEADS = {"num_attention_heads": 3, "num_key_value_heads": 1, "attention_k_eq_v": False}
REFUSED = [
    ({"architectures": ["Gemma4ForCausalLM"]}, {}, "is not a Gemma4AssistantForCausalLM"),
    ({"backbone_hidden_size": 48}, {}, "target hidden size is 48, the target's 32"),
    ({"backbone_hidden_size": None}, {}, "lacks 'backbone_hidden_size'"),
    (
        {},
        {"per_layer_config": {"1": {"head_dim": 32}}},
        "full_attention layer with heads of 32, and the target has none",
    ),
    ({}, HEADS, "3 query heads cannot be shared among the target's 2"),
    ({}, {"vocab_size": 512}, "vocabulary is 512"),
    ({}, {"enable_moe_block": True}, "enable_moe_block of an assistant is not supported"),
    ({"use_ordered_embeddings": True, "num_centroids": 7}, {}, "7 centroids cannot choose"),
]


@pytest.mark.parametrize(("outer", "inner", "words"), REFUSED)
def test_what_does_not_fit_is_refused(
    outer: dict[str, Any], inner: dict[str, Any], words: str, root: Path, tmp_path: Path
) -> None:
    config = json.loads((root / "gemma4-plain" / "config.json").read_text())
    text = {**config["text_config"], **inner}
    (tmp_path / "config.json").write_text(json.dumps({**config, **outer, "text_config": text}))
    with pytest.raises(ConfigError, match=words):
        assisted(root, "gemma4", "plain", speculative_draft_model_path=str(tmp_path))


def test_trees_are_refused(root: Path) -> None:
    with pytest.raises(ConfigError, match="eagle_topk is set, but is no option of FROZEN_KV_MTP"):
        assisted(root, "gemma4", "plain", speculative_eagle_topk=4)


def test_doctor_explains_it(root: Path, tmp_path: Path) -> None:
    for form, head in (("plain", "all tokens"), ("centroids", "the best 3 of 16 centroids")):
        source = root / f"gemma4-{form}"
        found = explain_draft(source)
        want = {
            "kind": "Gemma 4's assistant",
            "algorithms": ["FROZEN_KV_MTP"],
            "head": head,
            "layers": 3,
            "layer_types": TEXT["layer_types"],
            "num_drafts": 3,
            "weights": "as the config says",
        }
        assert {name: found[name] for name in want} == want
        folder = tmp_path / form
        folder.mkdir()
        (folder / "config.json").write_bytes((source / "config.json").read_bytes())
        assert explain_draft(folder)["weights"] == "not here"
        weights = load_file(source / "model.safetensors")
        weights["model.gru.weight"] = weights.pop("pre_projection.weight")
        save_file(weights, folder / "model.safetensors")
        assert "pre_projection.weight" in explain_draft(folder)["weights"]
