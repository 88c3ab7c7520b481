"""GGUF files: the model of transformers with the same weights; broken files end in one line."""

from __future__ import annotations

import json
import random
import struct
import time
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize

from forerun import LLM
from forerun.core.errors import ConfigError
from forerun.llm.bundled import bundled
from forerun.models.gguf.config import FAMILIES, config_of
from forerun.models.gguf.folder import gguf_folder
from forerun.models.gguf.reader import KINDS, read_gguf
from forerun.models.gguf.tokenizer import EXPRESSIONS, tokenizer_of
from forerun.models.loader import load_target
from forerun.models.tokenizer import PROBES, load_tokenizer
from tests.models.gguf_files import write_gguf
from tests.models.support import CPU, Loop, family

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 96}
LENGTH = 40
GEMMA = {
    "sliding_window": 6,
    "query_pre_attn_scalar": 16,
    "head_dim": 16,
    "tie_word_embeddings": True,
}


@pytest.fixture(autouse=True)
def _cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def small(name: str, **changes: Any) -> Any:
    return family(name, **SIZES, **changes)


def hold(path: Path, hf: Any) -> None:
    """The logits of a file without a tokenizer are those of transformers."""
    folder = path.parent / "folder"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config_of(read_gguf(path))))
    (folder / "model.gguf").symlink_to(path)
    model = load_target(folder, torch.float32, CPU)
    ids = torch.randint(0, 96, (LENGTH,), generator=torch.Generator().manual_seed(3))
    hidden, _ = Loop.of_model(model).ragged([(0, ids)])
    with torch.no_grad():
        want = hf(ids[None]).logits[0]
    torch.testing.assert_close(model.compute_logits(hidden), want, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_llama_in_every_kind(kind: str, tmp_path: Path) -> None:
    hf = small("llama")
    hold(tmp_path / "m.gguf", write_gguf(tmp_path / "m.gguf", hf, kind))


@pytest.mark.parametrize("name", ["llama-tied-mqa", "qwen2", "qwen3"])
def test_families(name: str, tmp_path: Path) -> None:
    hold(tmp_path / "m.gguf", write_gguf(tmp_path / "m.gguf", small(name), "Q8_0"))


def test_linear_scaling(tmp_path: Path) -> None:
    hf = small("llama-linear")
    extra = {"rope.freq_base": 5000.0, "rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
    hold(tmp_path / "m.gguf", write_gguf(tmp_path / "m.gguf", hf, "Q8_0", extra))


@pytest.mark.parametrize(("name", "layers"), [("gemma2", 2), ("gemma3", 6)])
def test_gemma(name: str, layers: int, tmp_path: Path) -> None:
    period = 6 if name == "gemma3" else 2
    kinds = [
        "full_attention" if i % period == period - 1 else "sliding_attention" for i in range(layers)
    ]
    hf = small(name, **GEMMA, num_hidden_layers=layers, layer_types=kinds)
    extra = {"rope.freq_base": 1_000_000.0} if name == "gemma3" else {}
    if name == "gemma2":
        extra["attn_logit_softcapping"] = float(hf.config.attn_logit_softcapping)
        extra["final_logit_softcapping"] = float(hf.config.final_logit_softcapping)
    hold(tmp_path / "m.gguf", write_gguf(tmp_path / "m.gguf", hf, "Q8_0", extra))


@pytest.mark.parametrize("kind", KINDS)
def test_stored_blocks_mean_what_the_package_says(kind: str, tmp_path: Path) -> None:
    """Of kinds that it cannot quantize, random blocks."""
    number = GGMLQuantizationType[kind]
    rng, writer = np.random.default_rng(0), GGUFWriter(tmp_path / "m.gguf", "llama")
    from gguf import GGML_QUANT_SIZES

    block, size = GGML_QUANT_SIZES[number]
    rows = rng.integers(0, 60, (6, 512 // block * size), dtype=np.uint8)  # small exponents
    writer.add_tensor("token_embd.weight", rows, raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = read_gguf(tmp_path / "m.gguf")
    assert file.tensors["token_embd.weight"].shape == (6, 512)
    got = file.dequantized("token_embd.weight").float().numpy()
    assert np.array_equal(got, dequantize(rows, number), equal_nan=True)


# --- tokenizers ---------------------------------------------------------------------------------


def byte_level(path: Path, pre: str, **more: Any) -> Any:
    """Writes the bundled tokenizer's vocabulary as a GGUF's; returns what transformers makes."""
    from tokenizers import Tokenizer

    own = json.loads((bundled("target") / "tokenizer.json").read_text())
    vocab = dict(own["model"]["vocab"])
    added = {token["content"]: token["id"] for token in own["added_tokens"]}
    tokens = [t for t, _ in sorted((vocab | added).items(), key=lambda each: each[1])]
    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in added else 1 for token in tokens])
    merges = [m if isinstance(m, str) else " ".join(m) for m in own["model"]["merges"]]
    writer.add_token_merges(merges)
    writer.add_eos_token_id(tokens.index(next(iter(added))))
    for name, value in more.items():
        getattr(writer, f"add_{name}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Tokenizer.from_file(str(bundled("target") / "tokenizer.json"))


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", *EXPRESSIONS])
def test_byte_level_tokenizers(pre: str, tmp_path: Path) -> None:
    """Words are cut as the published tokenizers cut them; texts come back whole."""
    from tokenizers import Regex, pre_tokenizers

    byte_level(tmp_path / "m.gguf", pre)
    tokenizer, _ = tokenizer_of(read_gguf(tmp_path / "m.gguf"))
    split = {
        "gpt-2": [],
        "smollm": [pre_tokenizers.Digits(individual_digits=True)],
        **{k: [pre_tokenizers.Split(Regex(e), "isolated")] for k, e in EXPRESSIONS.items()},
    }[pre]
    words = pre_tokenizers.Sequence(
        [*split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre not in EXPRESSIONS)]
    )
    for text in PROBES:
        own = [w for w, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)]
        assert own == [w for w, _ in words.pre_tokenize_str(text)]
        if pre != "qwen2":  # NFC changes some
            ids = tokenizer.encode(text).ids
            assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_the_bundled_tokenizer_as_gguf(tmp_path: Path) -> None:
    same = byte_level(tmp_path / "m.gguf", "gpt-2")
    own = json.loads((bundled("target") / "tokenizer.json").read_text())
    tokenizer, config = tokenizer_of(read_gguf(tmp_path / "m.gguf"))
    tokenizer.pre_tokenizer = same.pre_tokenizer  # how words are cut is the one before
    special = [token["content"] for token in own["added_tokens"]]
    for text in (*PROBES, *(f"a{token}b" for token in special)):
        assert tokenizer.encode(text).ids == same.encode(text).ids
    assert config["eos_token"] == special[0]


def test_sentence_piece(tmp_path: Path) -> None:
    """Pieces are merged by their scores, unknown characters become bytes."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    words = ["▁", "h", "e", "l", "o", "w", "r", "d", "he", "ll", "hell", "hello", "▁hello", "▁w"]
    words += ["or", "ld", "orld", "▁world"]
    tokens = pieces + words
    scores = [0.0] * len(pieces) + [-float(100 - i) for i in range(len(words))]
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types([2, 3, 3, *[6] * 256, *[1] * len(words)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tokenizer, config = tokenizer_of(read_gguf(tmp_path / "m.gguf"))
    assert tokenizer.encode("hello world").tokens == ["<s>", "▁hello", "▁world"]
    assert tokenizer.encode("é").tokens == ["<s>", "▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokenizer.encode("hello é world").ids) == "hello é world"
    assert config["bos_token"] == "<s>"


# --- what users do ------------------------------------------------------------------------------


def test_a_file_as_model_path(tmp_path: Path) -> None:
    """Text of `LLM` equals transformers', plain and drafted; the folder is made once."""
    path = tmp_path / "m.gguf"
    with_tokenizer(path)
    folder = gguf_folder(path)
    assert folder == gguf_folder(path)
    tokenizer = load_tokenizer(folder)
    hf = small_with_vocab(tmp_path / "again.gguf", len(tokenizer))
    prompt = "def add(a, b):\n"
    ids = tokenizer(prompt)["input_ids"]
    with torch.no_grad():
        want = hf.generate(torch.tensor([ids]), max_new_tokens=24, do_sample=False, eos_token_id=-1)
    params = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
    for algorithm in (None, "NGRAM"):
        with LLM(str(path), dtype="float32", device="cpu", speculative_algorithm=algorithm) as llm:
            assert llm.generate(prompt, params).output_ids == want[0, len(ids) :].tolist()


def test_ollamas_files_have_no_suffix(tmp_path: Path) -> None:
    path = tmp_path / "sha256-0a1b"
    with_tokenizer(path)
    with LLM(str(path), dtype="float32", device="cpu", max_total_tokens=512) as llm:
        assert len(llm.generate("a", {"max_new_tokens": 2, "ignore_eos": True}).output_ids) == 2
    path.write_text("{}")
    with pytest.raises(ConfigError, match="is not a folder"):
        LLM(str(path), device="cpu")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("downloads", r"is a folder of GGUF files; name one of them, such as .*downloads/m\.gguf"),
        ("downloads/m.gguf:Q4_1", "a file has one kind; leave out ':Q4_1'"),
        ("downloads/n.gguf", "there is no such file"),
    ],
)
@pytest.mark.parametrize("relative", [False, True])  # "a/b" could be a name on the Hub
def test_what_users_of_gguf_files_give(
    given: str, message: str, relative: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "downloads").mkdir()
    with_tokenizer(tmp_path / "downloads" / "m.gguf")
    (tmp_path / "downloads" / "tokens.gguf").unlink()
    with pytest.raises(ConfigError, match=message):
        LLM(given if relative else str(tmp_path / given), device="cpu")


def small_with_vocab(path: Path, vocab: int) -> Any:
    return write_gguf(path, family("llama", **{**SIZES, "vocab_size": vocab}), "Q8_0")


def with_tokenizer(path: Path) -> None:
    """A small random model with the bundled tokenizer."""
    byte_level(path.with_name("tokens.gguf"), "gpt-2")
    own = read_gguf(path.with_name("tokens.gguf"))
    small_with_vocab(path.with_name("weights.gguf"), len(own.metadata["tokenizer.ggml.tokens"]))
    join(path, path.with_name("weights.gguf"), own.metadata)


def join(path: Path, weights: Path, tokens: Any, tensors: Any = types.MappingProxyType({})) -> None:
    """Writes the weights and metadata of one file with the tokenizer, or tensors, of another."""
    file = read_gguf(weights)
    writer = GGUFWriter(path, file.metadata["general.architecture"])
    for key, value in {**file.metadata, **tokens}.items():
        if key == "general.architecture":
            continue
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_array(key, value if isinstance(value, list) else value.tolist())
    for name, tensor in file.tensors.items():
        kind = GGMLQuantizationType[tensor.kind]
        data = np.array(file.stored(name))
        if tensor.kind == "F32":
            data = data.view(np.float32).reshape(tensor.shape)
        writer.add_tensor(name, data, raw_dtype=kind)
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# --- bad input ----------------------------------------------------------------------------------


@pytest.fixture
def good(tmp_path: Path) -> bytes:
    with_tokenizer(tmp_path / "good.gguf")
    return (tmp_path / "good.gguf").read_bytes()


@pytest.mark.exhaustive
def test_broken_files_end_in_one_line(good: bytes, tmp_path: Path) -> None:
    """Truncated anywhere, or with bytes of the header changed: a folder or a ConfigError, soon."""
    rng, path = random.Random(0), tmp_path / "bad.gguf"
    cases = [good[: len(good) * i // 24] for i in range(24)]
    header = len(good) - sum(t.bytes for t in read_gguf(tmp_path / "good.gguf").tensors.values())
    for _ in range(60):
        data = bytearray(good)
        for _ in range(rng.choice((1, 1, 4, 30))):
            at = rng.randrange(min(4000, header)) if rng.random() < 0.7 else rng.randrange(header)
            data[at] = rng.choice((0, 255, rng.randrange(256)))
        cases.append(bytes(data))
    refused = 0
    for i, data in enumerate(cases):
        path.write_bytes(data)
        begin = time.monotonic()
        try:
            load_target(gguf_folder(path), torch.float32, CPU)
        except ConfigError as error:
            assert "\n" not in str(error)
            refused += 1
        assert time.monotonic() - begin < 20, i
    assert refused >= 24


def test_what_is_refused_says_why(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"

    def refuses(data: bytes, message: str) -> None:
        path.write_bytes(data)
        with pytest.raises(ConfigError, match=message):
            gguf_folder(path)

    head = struct.pack("<4sIQQ", b"GGUF", 3, 0, 0)
    refuses(b"PK" + head, "does not begin with GGUF")
    refuses(struct.pack("<4sIQQ", b"GGUF", 1, 0, 0), "version is 1")
    refuses(struct.pack("<4sIQQ", b"GGUF", 3, 1 << 60, 0), "claims")
    refuses(head, "architecture None")
    refuses(head[:10], "too short")
    writer = GGUFWriter(path, "rwkv7")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    refuses(path.read_bytes(), f"rwkv7.*Known: {', '.join(FAMILIES)}")
    with pytest.raises(ConfigError, match="not a regular file"):
        read_gguf(tmp_path)


def kind_at(data: bytes, name: str, dims: int) -> int:
    """Where a tensor's kind is in a file's header, 4 bytes; its offset follows, 8 bytes."""
    return data.index(name.encode()) + len(name) + 4 + 8 * dims


def replaced(data: bytes, at: int, by: bytes) -> bytes:
    return data[:at] + by + data[at + len(by) :]


def test_tensors_have_places_of_their_own(good: bytes, tmp_path: Path) -> None:
    path, tensors = tmp_path / "m.gguf", read_gguf(tmp_path / "good.gguf").tensors
    name = "blk.0.ffn_down.weight"
    begin = min(tensor.offset for tensor in tensors.values())
    at = kind_at(good, name, 2) + 4
    assert struct.unpack_from("<Q", good, at)[0] == tensors[name].offset - begin
    for offset in (1, 0, tensors[name].offset - begin + 32):
        path.write_bytes(replaced(good, at, struct.pack("<Q", offset)))
        with pytest.raises(ConfigError, match=f"begins at {offset} and what is before it ends"):
            read_gguf(path)


def test_a_damaged_kind_or_alignment_is_found(good: bytes, tmp_path: Path) -> None:
    """Of a norm, whose bytes would otherwise be read as others' or as NaN."""
    path, at = tmp_path / "m.gguf", kind_at(good, "blk.0.attn_norm.weight", 1)
    assert struct.unpack_from("<I", good, at)[0] == 0  # F32
    path.write_bytes(replaced(good, at, struct.pack("<I", 8)))
    with pytest.raises(ConfigError, match="and what is before it ends at"):
        read_gguf(path)
    for alignment in (3, 48):
        join(path, tmp_path / "good.gguf", {"general.alignment": alignment})
        with pytest.raises(ConfigError, match=f"alignment is {alignment}, expected a power of two"):
            read_gguf(path)


def test_names_of_tensors_are_shown_on_one_line(good: bytes, tmp_path: Path) -> None:
    path, name = tmp_path / "m.gguf", "blk.0.attn_norm.weight"
    begin = good.index(name.encode())
    evil = b"evil\nforerun: fine\x1b[2J".ljust(len(name), b"x")
    assert len(evil) == len(name)
    unknown = replaced(good, kind_at(good, name, 1), struct.pack("<I", 99))
    path.write_bytes(replaced(unknown, begin, evil))
    with pytest.raises(ConfigError, match="of kind 99") as caught:
        read_gguf(path)
    assert str(caught.value).isprintable()
    path.write_bytes(replaced(good, begin - 8, struct.pack("<Q", 4096)))
    with pytest.raises(ConfigError, match=r"name has \d+ characters") as caught:
        read_gguf(path)
    assert len(str(caught.value)) < 300


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    path, whole = tmp_path / "m.gguf", tmp_path / "whole.gguf"
    write_gguf(whole, family("llama", **SIZES), "Q8_0")
    join(path, whole, {"general.type": "adapter"})
    with pytest.raises(ConfigError, match=r"holds 'adapter' \(general.type\), expected a model"):
        gguf_folder(path)


def test_metadata_out_of_range_are_refused_by_the_files_name(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, family("llama", **SIZES), "Q8_0", {"rope.freq_base": float("nan")})
    with pytest.raises(ConfigError, match=r"m.gguf \(metadata\): rope_theta"):
        gguf_folder(path)


def test_metadata_of_other_types_are_refused(good: bytes, tmp_path: Path) -> None:
    """Lists where a value is expected, and the other way round."""
    path, cases = tmp_path / "m.gguf", dict[str, Any]()
    for key in ("tokenizer.ggml.bos_token_id", "llama.rope.scaling.type", "llama.block_count"):
        cases[key] = np.array([1.0, np.nan])
    for key, value in cases.items():
        join(path, tmp_path / "good.gguf", {key: value})
        with pytest.raises(ConfigError, match=key.removeprefix("llama.")):
            gguf_folder(path)
    for key, value in (("model", ["a", "b"]), ("token_type", 1), ("token_type", ["a"])):
        join(path, tmp_path / "good.gguf", {f"tokenizer.ggml.{key}": value})
        with pytest.raises(ConfigError, match=r"m\.gguf has no tokenizer that can be used"):
            load_tokenizer(gguf_folder(path))


def test_factors_of_rope_are_one_for_each_pair(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    model = family("llama", **SIZES)
    pairs = model.config.hidden_size // model.config.num_attention_heads // 2
    for shape in ((2, pairs), (pairs + 1,)):
        write_gguf(tmp_path / "plain.gguf", model, "Q8_0")
        factors = {"rope_freqs.weight": np.ones(shape, np.float32)}
        join(path, tmp_path / "plain.gguf", {}, factors)
        with pytest.raises(ConfigError, match=rf"rope_freqs.weight has shape .*\[{pairs}\]"):
            gguf_folder(path)


def test_a_part_of_a_divided_model_says_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(tmp_path / "whole.gguf", family("llama", **SIZES), "Q8_0")
    join(path, tmp_path / "whole.gguf", {"split.count": 3})
    with pytest.raises(ConfigError, match=r"m\.gguf is one of 3 files .*llama-gguf-split --merge"):
        gguf_folder(path)


def test_tensors_that_do_not_fit_are_refused_by_the_files_name(tmp_path: Path) -> None:
    """And not by that of the folder in the cache."""
    path, one = tmp_path / "m.gguf", np.ones(3, np.float32)
    write_gguf(tmp_path / "whole.gguf", family("llama", **SIZES), "Q8_0")
    cases: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "m.gguf lacks 9 tensors: .* Download the file again": ({"llama.block_count": 4}, {}),
        r"m.gguf holds 1 tensor: 'a\\nb', which this": ({}, {"a\nb": one}),
        "m.gguf: .* expected .* from its metadata": ({"llama.feed_forward_length": 64}, {}),
    }
    for message, (metadata, tensors) in cases.items():
        join(path, tmp_path / "whole.gguf", metadata, tensors)
        with pytest.raises(ConfigError, match=f"^{tmp_path}/{message}"):
            load_target(gguf_folder(path), torch.float32, CPU)


def test_a_file_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, family("llama", **SIZES), "Q8_0")
    with pytest.raises(
        ConfigError, match=r"m.gguf has no tokenizer that can be used\. .+ Say so\.$"
    ):
        load_tokenizer(gguf_folder(path), "Say so.")


def test_heads_that_rotate_in_part_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    model = family("llama", **SIZES)
    whole = model.config.hidden_size // model.config.num_attention_heads
    write_gguf(path, model, "Q8_0", {"rope.dimension_count": whole})
    assert config_of(read_gguf(path))["head_dim"] == whole
    write_gguf(path, model, "Q8_0", {"rope.dimension_count": whole // 2})
    with pytest.raises(ConfigError, match=f"rope.dimension_count is {whole // 2}, and heads have"):
        config_of(read_gguf(path))
