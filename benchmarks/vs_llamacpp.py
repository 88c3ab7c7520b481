"""Plain decoding on a CPU beside llama.cpp: same weights, machine and minute, a process each.

    pip install llama-cpp-python
    python benchmarks/vs_llamacpp.py                       # bundled target, float32 / f32, 1 thread
    python benchmarks/vs_llamacpp.py --format int8         # int8 / Q8_0
    python benchmarks/vs_llamacpp.py --shape 0.6b --threads 0     # random weights, all cores
    python benchmarks/vs_llamacpp.py --model FILE.gguf --prefill 512     # one file for both
    python benchmarks/vs_llamacpp.py --model FILE.gguf --format int8     # tokens in 8 bits in both

Both engines continue the same token ids greedily, one request at a time, and take turns. A round's
ratio is Forerun's tokens/s over llama.cpp's; the median over rounds is printed. llama.cpp is called
through its C interface, `llama_decode` per token and an argmax in numpy, which is less work than
llama-cpp-python's own generation. Where others use the machine, `--cpu-time` counts seconds of CPU
time in the place of those that pass (one thread). The GGUF file is written from the checkpoint;
with random weights (`--shape`) the engines have different ones of the same shape.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import multiprocessing
import os
import statistics
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from forerun import LLM, SamplingParams
from forerun.config.model_config import ModelConfig, load_model_config
from forerun.core.errors import ConfigError
from forerun.llm.bundled import bundled
from forerun.platform.cpu_threads import intra_op_threads
from forerun_bench.bounds import step_work
from forerun_bench.ceilings import gemm_flops

MISSING = (
    "llama-cpp-python is not installed, so there is nothing to compare with."
    " Install it (pip install llama-cpp-python; it compiles llama.cpp), or use"
    " --only-forerun to print Forerun's speed alone."
)
PROMPT = [11, 42, 7, 300, 5, 96, 1024, 17]
CPU = torch.device("cpu")
ALIGNMENT = 32
BLOCK = 32  # values of a Q8_0 block

# GGUF's numbers of value types and of tensor types (ggml's docs/gguf.md).
U32, F32, STRING = 4, 6, 8
TENSOR_TYPES = {"float32": 0, "int8": 8, "bfloat16": 30}

QWEN3_0_6B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}


@dataclass(frozen=True)
class Tensor:
    """Of a GGUF file; `read` gives it as float32."""

    name: str
    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]


def gguf_names(config: ModelConfig) -> dict[str, str]:
    """Name in the checkpoint -> name in GGUF."""
    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm"}
    if not config.tie_word_embeddings:
        names["lm_head"] = "output"
    parts = {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "self_attn.o_proj": "attn_output",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        **{f"self_attn.{x}_proj": f"attn_{x}" for x in "qkv"},
    }
    for layer in range(config.num_layers):
        names |= {f"model.layers.{layer}.{a}": f"blk.{layer}.{b}" for a, b in parts.items()}
    return {f"{a}.weight": f"{b}.weight" for a, b in names.items()}


def checkpoint_tensors(folder: Path, config: ModelConfig) -> Iterator[Tensor]:
    from safetensors import safe_open

    for path in sorted(folder.glob("*.safetensors")):
        file = safe_open(path, "pt")
        for name, target in gguf_names(config).items():
            if name in file.keys():  # noqa: SIM118 - not a mapping

                def read(name: str = name, file: Any = file) -> np.ndarray:
                    return file.get_tensor(name).float().numpy()

                yield Tensor(target, tuple(file.get_slice(name).get_shape()), read)


def random_tensors(config: ModelConfig) -> Iterator[Tensor]:
    hidden, dim, inner = config.hidden_size, config.head_dim, int(config.raw["intermediate_size"])
    heads, kv_heads = config.num_heads * dim, config.num_kv_heads * dim
    shapes = {
        "token_embd": (config.vocab_size, hidden),
        "attn_q": (heads, hidden),
        "attn_k": (kv_heads, hidden),
        "attn_v": (kv_heads, hidden),
        "attn_output": (hidden, heads),
        "ffn_gate": (inner, hidden),
        "ffn_up": (inner, hidden),
        "ffn_down": (hidden, inner),
        "attn_q_norm": (dim,),
        "attn_k_norm": (dim,),
    }
    generator = np.random.default_rng(0)
    for name in gguf_names(config).values():
        shape = shapes.get(name.removesuffix(".weight").split(".")[-1], (hidden,))

        def read(shape: tuple[int, ...] = shape) -> np.ndarray:
            if len(shape) == 1:
                return np.ones(shape, np.float32)
            return generator.standard_normal(shape, np.float32) * 0.02

        yield Tensor(name, shape, read)


def encode(values: np.ndarray, format: str) -> bytes:
    """Matrices in `format`, vectors in float32."""
    if values.ndim == 1 or format == "float32":
        return values.astype(np.float32).tobytes()
    if format == "bfloat16":
        return torch.from_numpy(values).bfloat16().view(torch.int16).numpy().tobytes()
    blocks = values.reshape(-1, BLOCK)
    scale = (np.abs(blocks).max(1, keepdims=True) / 127).astype(np.float16)
    inverse = np.divide(
        1, scale.astype(np.float32), where=scale > 0, out=np.zeros(scale.shape, "f4")
    )
    rounded = np.clip(np.rint(blocks * inverse), -127, 127).astype(np.int8)
    return np.concatenate([scale.view(np.uint8), rounded.view(np.uint8)], 1).tobytes()


def encoded_bytes(tensor: Tensor, format: str) -> int:
    count = int(np.prod(tensor.shape))
    if len(tensor.shape) == 1 or format == "float32":
        return 4 * count
    return 2 * count if format == "bfloat16" else count // BLOCK * (BLOCK + 2)


def write_gguf(file: BinaryIO, config: ModelConfig, tensors: list[Tensor], format: str) -> None:
    """GGUF version 3, without a vocabulary."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value.encode())) + value.encode()

    def entry(key: str, value: str | int | float) -> bytes:
        if isinstance(value, str):
            return text(key) + struct.pack("<I", STRING) + text(value)
        kind, code = (F32, "f") if isinstance(value, float) else (U32, "I")
        return text(key) + struct.pack(f"<I{code}", kind, value)

    sizes = {
        "block_count": config.num_layers,
        "context_length": config.max_position,
        "embedding_length": config.hidden_size,
        "feed_forward_length": int(config.raw["intermediate_size"]),
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.freq_base": float(config.rope.theta),
        "vocab_size": config.vocab_size,
    }
    entries = {"general.architecture": "qwen3", "tokenizer.ggml.model": "no_vocab"}
    head = b"".join(entry(k, v) for k, v in entries.items())
    head += b"".join(entry(f"qwen3.{k}", v) for k, v in sizes.items())
    offset, infos = 0, b""
    for tensor in tensors:
        kind = TENSOR_TYPES["float32" if len(tensor.shape) == 1 else format]
        dims = struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *reversed(tensor.shape))
        infos += text(tensor.name) + dims + struct.pack("<IQ", kind, offset)
        offset += -(-encoded_bytes(tensor, format) // ALIGNMENT) * ALIGNMENT
    count = len(entries) + len(sizes)
    file.write(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), count) + head + infos)
    for tensor in tensors:
        file.write(bytes(-file.tell() % ALIGNMENT))
        file.write(encode(tensor.read(), format))
    file.write(bytes(-file.tell() % ALIGNMENT))


class LlamaCpp:
    """Greedy decoding by llama.cpp's C interface."""

    def __init__(self, path: Path, threads: int, context: int) -> None:
        import llama_cpp

        self.api = llama_cpp
        # Its log would hide the table; the callback must stay alive.
        self._log = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(self._log, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = 0
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
        assert self.model, "llama.cpp does not load the GGUF file"
        options = llama_cpp.llama_context_default_params()
        options.n_ctx, options.n_threads, options.n_threads_batch = context, threads, threads
        options.no_perf = True
        self.context = llama_cpp.llama_init_from_model(self.model, options)
        assert self.context, "llama.cpp refuses the context"
        vocab = llama_cpp.llama_model_get_vocab(self.model)
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(vocab)

    def generate(self, prompt: list[int], count: int) -> list[int]:
        api, out, ids = self.api, [], prompt
        api.llama_memory_clear(api.llama_get_memory(self.context), True)
        while True:
            array = (api.llama_token * len(ids))(*ids)
            assert api.llama_decode(self.context, api.llama_batch_get_one(array, len(ids))) == 0
            logits = api.llama_get_logits_ith(self.context, -1)
            token = int(np.ctypeslib.as_array(logits, (self.vocab_size,)).argmax())
            out.append(token)
            if len(out) == count:
                return out
            ids = [token]


def settings(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    if args.model is not None:
        args = argparse.Namespace(**{**vars(args), "shape": "pair"})
        dtype = "auto"
    else:
        dtype = "float32" if args.format == "int8" else args.format
    out: dict[str, Any] = {
        "model_path": folder,
        "dtype": dtype,
        "device": "cpu",
        "max_running_requests": 1,
        "disable_radix_cache": True,
        "skip_tokenizer_init": True,
    }
    if args.format == "int8":
        out["quantization"] = "int8"
    if args.shape != "pair":
        out |= {"load_format": "dummy", "context_length": 2048}
    return out


def model_folder(args: argparse.Namespace, work: Path) -> Path:
    """The target's folder, or a GGUF file."""
    if args.model is not None:
        return args.model
    if args.shape == "pair":
        return bundled("target")
    raw = QWEN3_0_6B | ({"num_hidden_layers": args.layers} if args.layers else {})
    (work / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    return work


def verify_ratios(args: argparse.Namespace) -> tuple[float, float]:
    """A step that verifies 16 tokens, found by prompt lookup, over a plain step of one request.

    Of the bundled target, as measured when the engine starts; the median of five. And what it
    takes at least: its GEMMs at the speed of a large one of PyTorch (int8: 0, there is none).
    """
    ratios, least = [], []
    flops = gemm_flops(CPU, getattr(torch, args.format)) if args.format != "int8" else math.inf
    drafts: dict[str, Any] = {
        "speculative_algorithm": "NGRAM",
        "speculative_num_draft_tokens": 16,
    }
    for _ in range(5):
        with LLM(**settings(args, bundled("target")), **drafts) as llm:
            info = llm.engine.executor.info
            assert info.step_costs is not None
            seconds = dict(zip(info.verify_widths, info.step_costs[1], strict=True))
            gemms = step_work(llm.engine, 1, 0).flops / flops
        ratios.append(seconds[16] / seconds[1])
        least.append(gemms / seconds[1])
    return statistics.median(ratios), statistics.median(least)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shape", choices=("pair", "0.6b"), default="pair")
    parser.add_argument("--format", choices=tuple(TENSOR_TYPES), default="float32")
    parser.add_argument("--threads", type=int, default=1, help="0: all cores")
    parser.add_argument("--tokens", type=int, default=128, help="generated per round")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--layers", type=int, default=0, help="of --shape 0.6b; 0: all 28")
    parser.add_argument("--only-forerun", action="store_true")
    parser.add_argument("--model", type=Path, help="a GGUF file, which both engines read")
    parser.add_argument("--prefill", type=int, default=0, help="tokens of a prompt, timed too")
    parser.add_argument("--cpu-time", action="store_true", help="seconds of CPU time; one thread")
    args = parser.parse_args()
    if args.cpu_time and args.threads != 1:
        parser.error("--cpu-time needs --threads 1: threads that wait take CPU time, too")
    if args.model is not None and not args.model.is_file():
        parser.error(f"--model {args.model} is not a file")
    return args


Generate = Callable[[list[int], int], list[int]]  # continues a prompt by so many tokens


@contextmanager
def forerun_engine(args: argparse.Namespace, folder: Path, threads: int) -> Iterator[Generate]:
    torch.set_num_threads(threads)
    with LLM(**settings(args, folder)) as llm, intra_op_threads(threads):

        def generate(prompt: list[int], count: int) -> list[int]:
            params = SamplingParams(temperature=0, max_new_tokens=count, ignore_eos=True)
            return list(llm.generate(input_ids=prompt, sampling_params=params).output_ids)

        yield generate


@contextmanager
def llama_engine(path: Path, threads: int) -> Iterator[Generate]:
    llama = LlamaCpp(path, threads, 2048)
    yield llama.generate


Clock = Callable[[], float]


class EngineProcess:
    """An engine in a process of its own, which sleeps while it is not asked.

    In one process the threads of one engine would wait on the cores that the other computes on.
    """

    def __init__(self, clock: Clock, engine: Callable[..., Any], *arguments: Any) -> None:
        """`engine(*arguments)`: a context manager that gives a `Generate`.

        Raises:
            ConfigError: the engine refuses its settings.
        """
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        target, given = EngineProcess._serve, (theirs, clock, engine, arguments)
        self._process = context.Process(target=target, args=given, daemon=True)
        self._process.start()
        theirs.close()
        error = self._pipe.recv()
        if error is not None:
            raise ConfigError(error)

    @staticmethod
    def _serve(
        pipe: Connection, clock: Clock, engine: Callable[..., Any], arguments: tuple[Any, ...]
    ) -> None:
        try:
            with engine(*arguments) as generate:
                pipe.send(None)
                while (request := pipe.recv()) is not None:
                    begin = clock()
                    ids = generate(*request)
                    pipe.send((ids, clock() - begin))
        except ConfigError as error:
            pipe.send(str(error))

    def generate(self, prompt: list[int], count: int) -> tuple[list[int], float]:
        """Token ids, and seconds."""
        self._pipe.send((prompt, count))
        ids, seconds = self._pipe.recv()
        return ids, seconds

    def close(self) -> None:
        self._pipe.send(None)
        self._process.join()


def start_engines(args: argparse.Namespace, work: Path, threads: int) -> list[EngineProcess]:
    """Forerun, then llama.cpp unless it is left out."""
    folder = model_folder(args, work)
    clock = time.process_time if args.cpu_time else time.perf_counter
    os.environ["OMP_NUM_THREADS"] = str(threads)  # both engines keep to it
    engines = [EngineProcess(clock, forerun_engine, args, folder, threads)]
    if not args.only_forerun:
        path = args.model or written_gguf(args, folder, work)
        engines.append(EngineProcess(clock, llama_engine, path, threads))
    return engines


def written_gguf(args: argparse.Namespace, folder: Path, work: Path) -> Path:
    config, path = load_model_config(folder), work / "model.gguf"
    random = args.shape != "pair"
    found = random_tensors(config) if random else checkpoint_tensors(folder, config)
    with path.open("wb") as file:
        write_gguf(file, config, list(found), args.format)
    return path


def compare(
    args: argparse.Namespace, engines: list[EngineProcess], prompt: list[int], count: int
) -> None:
    """Prints tokens/s: of the prompt where one token follows it, else of the continuation."""
    rounds = []
    for round in range(args.rounds + 1):  # the first one warms up
        results = [engine.generate(prompt, count) for engine in engines]
        if round:
            tokens = len(prompt) if count == 1 else count
            rounds.append([tokens / seconds for _, seconds in results])
    ours, *others = (statistics.median(speeds) for speeds in zip(*rounds, strict=True))
    print(f"  forerun    {ours:8.1f} tokens/s")
    for theirs in others:
        ratio = statistics.median(a / b for a, b in rounds)
        print(f"  llama.cpp  {theirs:8.1f} tokens/s, {ratio:.2f} x as fast here")
        if (args.model or args.shape == "pair") and results[0][0] == results[1][0]:
            print("  both wrote the same tokens")


def run(args: argparse.Namespace, work: Path) -> None:
    threads = args.threads or os.cpu_count() or 1
    engines = start_engines(args, work, threads)
    what = f"{args.model.name if args.model else args.shape}, {args.format}"
    clock = ", CPU time" if args.cpu_time else ""
    print(
        f"{what}, {threads} thread(s), {args.tokens} tokens, median of {args.rounds}{clock},"
        " a process each"
    )
    compare(args, engines, PROMPT, args.tokens)
    if args.prefill:
        print(f"a prompt of {args.prefill} tokens")
        compare(args, engines, (PROMPT * args.prefill)[: args.prefill], 1)
    for engine in engines:
        engine.close()


def main() -> None:
    args = parse()
    if not args.only_forerun:
        try:
            import llama_cpp  # noqa: F401
        except ImportError:
            sys.exit(MISSING)
    try:
        with tempfile.TemporaryDirectory() as work:
            run(args, Path(work))
        if args.shape == "pair" and args.model is None:
            ratio, least = verify_ratios(args)
            bound = f", at least {least:.2f} for its arithmetic" if least else ""
            print(f"  a verify step of 16 tokens takes {ratio:.2f} plain steps{bound}")
    except ConfigError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
