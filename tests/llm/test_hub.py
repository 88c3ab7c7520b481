"""Models by name, from a Hub on 127.0.0.1, through `huggingface_hub` as it is.

The library reads its environment when it is imported, so what downloads runs in a process of its
own, with its own HF_HOME.
"""

from __future__ import annotations

import io
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from rich.console import Console
from safetensors.torch import load, save

from forerun import LLM, ConfigError
from forerun.config.engine_config import EngineConfig
from forerun.llm.download_progress import SECONDS_PER_LINE, DownloadProgress
from forerun.llm.hub import HubModel, parse, with_local_paths
from forerun.main import run
from forerun.models.embedding_layout import EmbeddingLayout, embedding_layout
from forerun.models.safetensors_files import INDEX
from tests.cli.support import PAIR, needs_pair
from tests.golden_engine import CASES, GOLDEN
from tests.llm.fresh_process import call
from tests.llm.hub_server import TOKEN, Files, Hub, Repo, serve

CASE = CASES[0]
IDS = ",".join(map(str, CASE["prompt"]))
SHARDS = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
GENERATE = (
    *("generate", "--input-ids", IDS, "--temperature", "0", "--max-new-tokens", "12"),
    *("--dtype", "float32", "--device", "cpu", "--max-total-tokens", "1024", "--json"),
    "--skip-tokenizer-init",
)
# Of sentence-transformers, and another format of the same model.
SENTENCES = {
    "modules.json": b'[{"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}]',
    "1_Pooling/config.json": b'{"pooling_mode_mean_tokens": true}',
    "onnx/config.json": b"{}",
}
DRAFT = ("--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", "acme/draft")


def resolve(*asked: dict[str, object]) -> None:
    """Prints for each of the settings the paths that they resolve to, or the error."""
    for settings in asked:
        try:
            config = with_local_paths(EngineConfig(**settings))  # type: ignore[arg-type]
            print(json.dumps({name: vars(config)[name] for name in settings}))
        except ConfigError as error:
            print(json.dumps({"error": str(error)}))


def folder_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def sharded(folder: Path) -> dict[str, bytes]:
    """The model's weights in two shards with an index, among files that must not be fetched."""
    files = folder_files(folder)
    tensors = load(files.pop("model.safetensors"))
    names = sorted(tensors)
    half = len(names) // 2
    parts = dict(zip(SHARDS, (names[:half], names[half:]), strict=True))
    index = {"weight_map": {name: shard for shard, part in parts.items() for name in part}}
    files[INDEX] = json.dumps(index).encode()
    for shard, part in parts.items():
        files[shard] = save({name: tensors[name] for name in part})
    unwanted = ("consolidated.safetensors", "pytorch_model.bin", "old.pt", "modeling_acme.py")
    return files | dict.fromkeys((*unwanted, "onnx/config.json"), b"not for us")


def gguf_files() -> Files:
    parts = ("m-Q6_K-00001-of-00002.gguf", "m-Q6_K-00002-of-00002.gguf")
    files = dict.fromkeys(("m-Q4_K_M.gguf", "m.q8_0.gguf", "a/m-Q8_0.gguf", *parts), b"x")
    return files | {"params.json": b"{}"}


@pytest.fixture(scope="module")
def repos() -> dict[str, Repo]:
    config = (GOLDEN / "target" / "config.json").read_bytes()
    odd = json.dumps({"weight_map": {"model.norm.weight": "run.py"}}).encode()
    pickled: Files = {"config.json": config, "pytorch_model.bin": b"pickle"}
    draft = folder_files(GOLDEN / "draft") | {"dflash.py": b"code", "more.safetensors": b"no"}
    tokens = {
        path.name: path.read_bytes() for path in (PAIR / "target").glob("tokenizer*.json")
    } | {"chat_template.jinja": b"{{ messages }}", "merges.txt": b"", "spiece.model": b""}
    return {
        "acme/base": Repo({"main": pickled, "v1": sharded(GOLDEN / "target")}),
        "acme/draft": Repo({"main": draft}),
        "acme/named": Repo({"main": {"config.json": config, "weights.safetensors": b"x"}}),
        "acme/embedding": Repo({"main": {**folder_files(GOLDEN / "target"), **SENTENCES}}),
        "acme/odd": Repo({"main": {"config.json": config, INDEX: odd, "run.py": b"code"}}),
        "acme/gguf": Repo({"main": gguf_files()}),
        "acme/gated": Repo({"main": folder_files(GOLDEN / "target")}, gated=True),
        "acme/private": Repo({"main": tokens}, private=True),
    }


@pytest.fixture
def hub(repos: dict[str, Repo]) -> Iterator[Hub]:
    with serve(repos) as running:
        yield running


class Shell:
    """Runs commands with a Hub and a cache of their own."""

    def __init__(self, url: str, home: Path) -> None:
        self.home = home
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
        self.env = clean | {
            "HF_ENDPOINT": url,
            "HF_HOME": str(home),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
            "OMP_NUM_THREADS": "1",
        }

    def forerun(self, *args: str, **env: str) -> CompletedProcess[str]:
        return call(self.env | env, run, args)

    def resolve(self, *settings: dict[str, object], **env: str) -> list[dict[str, str]]:
        done = call(self.env | env, resolve, *settings)
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    def errors(self, *names: str, **env: str) -> list[str]:
        """What each of them is refused with as `model_path`: one line."""
        found = [r["error"] for r in self.resolve(*({"model_path": n} for n in names), **env)]
        assert len(found) == len(names)
        assert not any("\n" in error for error in found)
        return found


@pytest.fixture
def shell(hub: Hub, tmp_path: Path) -> Shell:
    return Shell(hub.url, tmp_path / "hf")


def golden_ids(stdout: str) -> list[int]:
    return json.loads(stdout)["output_ids"]


@pytest.mark.exhaustive
def test_target_and_draft_come_from_the_hub_once(hub: Hub, shell: Shell) -> None:
    command = (*GENERATE, "--model-path", "acme/base@v1", *DRAFT)
    first = shell.forerun(*command)
    assert first.returncode == 0, first.stderr
    with LLM(GOLDEN / "target", dtype="float32", skip_tokenizer_init=True) as llm:
        params = {"temperature": 0, "max_new_tokens": 12}
        expected = llm.generate(input_ids=CASE["prompt"], sampling_params=params).output_ids
    assert golden_ids(first.stdout) == expected

    # The small files and the shards that the index lists; for the draft its one file.
    small = ["config.json", "generation_config.json"]
    assert hub.downloads("acme/base") == [*small, *SHARDS, INDEX]
    assert hub.downloads("acme/draft") == ["config.json", "model.safetensors"]
    assert not hub.tokens  # none was given
    cache = shell.home / "hub"
    for model in ("acme/base@v1", "acme/draft"):  # no terminal: lines, and these runs are short
        line = f"forerun: downloading {model}: from {hub.url} into {cache}"
        assert first.stderr.splitlines().count(line) == 1

    # With the network, only the revision is asked for; offline nothing is.
    hub.requests.clear()
    again = shell.forerun(*command)
    assert golden_ids(again.stdout) == expected
    assert not hub.downloads("acme/base") + hub.downloads("acme/draft")
    assert "downloading" not in again.stderr
    hub.requests.clear()
    offline = shell.forerun(*command, HF_HUB_OFFLINE="1")
    assert offline.returncode == 0, offline.stderr
    assert golden_ids(offline.stdout) == expected
    assert "downloading" not in offline.stderr
    assert not hub.requests

    # A shard that is not there is missed before anything is loaded.
    next(cache.glob(f"models--acme--base/snapshots/*/{SHARDS[1]}")).unlink()
    (error,) = shell.errors("acme/base@v1", HF_HUB_OFFLINE="1")
    assert error == (
        f"model_path: acme/base@v1 is not completely in the cache ({cache}), and HF_HUB_OFFLINE"
        " forbids downloading it. Unset HF_HUB_OFFLINE, or give a local folder."
    )


def test_refusals_say_the_fix(hub: Hub, shell: Shell) -> None:
    unknown, revision, short, gated, private, pickled, odd, no_config = shell.errors(
        "acme/nothing",
        "acme/draft@v9",
        "acme/draft@abc1234",
        "acme/gated",
        "acme/private",
        "acme/base",
        "acme/odd",
        "acme/gguf",
    )
    no_model = f"is neither a local folder nor a model on {hub.url}. Check the spelling; for a"
    assert unknown == f"model_path: 'acme/nothing' {no_model} private model set HF_TOKEN."
    assert private == unknown.replace("nothing", "private")
    assert revision == (
        "model_path: acme/draft has no revision 'v9'; see the branches and tags at"
        f" {hub.url}/acme/draft/tree/main."
    )
    assert "no revision 'abc1234'; a commit is given in full (40 digits)." in short
    assert gated == (
        f"model_path: acme/gated is gated. Accept its terms at {hub.url}/acme/gated and set"
        " HF_TOKEN to a token of that account."
    )
    assert pickled.startswith("model_path: acme/base on the Hugging Face Hub has no safetensors,")
    assert "convert it with transformers (save_pretrained)" in pickled
    assert hub.downloads("acme/base") == ["config.json"]
    assert "names 'run.py', expected a safetensors file" in odd  # an index does not fetch code
    assert hub.downloads("acme/odd") == ["config.json", INDEX]
    assert "acme/gguf on the Hugging Face Hub has no config.json; choose" in no_config
    assert "for GGUF files say which: acme/gguf:Q4_K_M" in no_config


def test_gguf_files_by_kind(hub: Hub, shell: Shell) -> None:
    broken, lower, missing, divided, no_kind = shell.errors(
        "acme/gguf:Q4_K_M", "acme/gguf:Q8_0", "acme/gguf:Q5_K_M", "acme/gguf:Q6_K", "acme/gguf:Q 4"
    )
    assert "m-Q4_K_M.gguf is not a usable GGUF file: it is too short" in broken
    assert "m.q8_0.gguf is not a usable GGUF file" in lower
    assert "acme/gguf on the Hugging Face Hub has no GGUF file of kind Q5_K_M" in missing
    assert "Q6_K of acme/gguf is divided among files" in divided
    assert "'Q 4' is no kind of GGUF file; give one such as acme/gguf:Q4_K_M" in no_kind
    assert not [name for name in hub.downloads("acme/gguf") if name.startswith("a/")]


def test_a_refusal_on_the_command_line(hub: Hub, shell: Shell) -> None:
    """A mistyped draft is found before the target's weights are downloaded. Exit code 2."""
    draft = [word.replace("acme/draft", "acme/daft") for word in DRAFT]
    done = shell.forerun(*GENERATE, "--model-path", "acme/base@v1", *draft)
    assert (done.returncode, done.stdout) == (2, "")
    *_, last = done.stderr.splitlines()
    assert last.startswith("forerun: error: speculative_draft_model_path: 'acme/daft' is neither")
    assert "Traceback" not in done.stderr
    assert not set(SHARDS) & set(hub.downloads("acme/base"))


def test_the_token_is_sent(hub: Hub, shell: Shell) -> None:
    gated, tokenizer = shell.resolve(
        {"model_path": "acme/gated"}, {"tokenizer_path": "acme/private"}, HF_TOKEN=TOKEN
    )
    assert hub.tokens == {f"Bearer {TOKEN}"}
    target = Path(gated["model_path"])
    wanted = (GOLDEN / "target" / "model.safetensors").read_bytes()
    assert (target / "model.safetensors").read_bytes() == wanted
    files = {path.name for path in Path(tokenizer["tokenizer_path"]).iterdir()}
    assert files == set(hub.repos["acme/private"].revisions["main"])


def test_a_wrong_token(hub: Hub, shell: Shell) -> None:
    (error,) = shell.errors("acme/draft", HF_TOKEN="hf_wrong")
    assert error.startswith(f"model_path: {hub.url} refuses acme/draft (Client error '401 ")
    assert error.endswith(". Check HF_TOKEN.")


def test_only_what_is_needed(hub: Hub, shell: Shell) -> None:
    """Random weights need none; a tokenizer that is not used, a draft without an algorithm."""
    commit = next(iter(hub.repos["acme/draft"].commits()))
    dummy, by_commit, unused, other = shell.resolve(
        {"model_path": "acme/base@v1", "load_format": "dummy"},
        {"model_path": f"acme/draft@{commit}", "load_format": "dummy"},
        {
            "tokenizer_path": "acme/private",
            "skip_tokenizer_init": True,
            "speculative_draft_model_path": "acme/nothing",
        },
        {"model_path": "acme/named"},
    )
    assert not [name for name in hub.downloads("acme/base") if name.endswith(".safetensors")]
    assert (Path(dummy["model_path"]) / "config.json").is_file()
    assert Path(by_commit["model_path"]).name == commit
    assert unused["tokenizer_path"] == "acme/private"
    assert unused["speculative_draft_model_path"] == "acme/nothing"
    # Weights of any name, where there is neither an index nor model.safetensors.
    assert (Path(other["model_path"]) / "weights.safetensors").is_file()


def test_how_embeddings_are_pooled_comes_along(hub: Hub, shell: Shell) -> None:
    """Of subfolders only the config of pooling."""
    (found,) = shell.resolve({"model_path": "acme/embedding"})
    folder = Path(found["model_path"])
    assert embedding_layout(folder, folder) == EmbeddingLayout("mean", False, True)
    assert "1_Pooling/config.json" in hub.downloads("acme/embedding")
    assert not [name for name in hub.downloads("acme/embedding") if name.startswith("onnx/")]


def test_without_a_network(tmp_path: Path) -> None:
    with serve({}) as gone:  # its port is free again
        pass
    shell = Shell(gone.url, tmp_path)
    (error,) = shell.errors("acme/base")
    cache = tmp_path / "hub"
    head = f"model_path: acme/base is not completely in the cache ({cache}), and"
    assert error.startswith(f"{head} {gone.url} gives no answer (")
    assert error.endswith("Check the network and HF_ENDPOINT, or give a local folder.")
    (error,) = shell.errors("acme/base", HF_HUB_OFFLINE="1")
    assert error.startswith(f"{head} HF_HUB_OFFLINE forbids")


def test_a_cache_that_cannot_be_written(shell: Shell) -> None:
    shell.home.write_text("a file, not a folder")
    (error,) = shell.errors("acme/draft")
    assert "Downloading acme/draft into " in error
    assert error.endswith("HF_HOME moves the cache.")


def test_doctor_takes_a_name(hub: Hub, shell: Shell) -> None:
    done = shell.forerun("doctor", "--model-path", "acme/base@v1", "--json")
    assert done.returncode == 0, done.stderr
    assert "config.json" in hub.downloads("acme/base")
    assert not set(SHARDS) & set(hub.downloads("acme/base"))


@needs_pair
@pytest.mark.exhaustive
def test_a_tokenizer_by_name(hub: Hub, shell: Shell) -> None:
    """For the bundled target, from a private repository."""
    done = shell.forerun(
        *("generate", "def add(a, b):", "--tokenizer-path", "acme/private", "--json"),
        *("--temperature", "0", "--max-new-tokens", "2", "--max-total-tokens", "1024"),
        HF_TOKEN=TOKEN,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["text"]
    assert "tokenizer.json" in hub.downloads("acme/private")


# --- names and paths ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "repo", "revision"),
    [
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B", None),
        ("a/b", "a/b", None),
        ("org_1/name.v2@main", "org_1/name.v2", "main"),
        ("org/name@refs/pr/1", "org/name", "refs/pr/1"),
        ("org/name@v1.0-rc+2", "org/name", "v1.0-rc+2"),
    ],
)
def test_names(given: str, repo: str, revision: str | None) -> None:
    found = parse("model_path", given)
    assert isinstance(found, HubModel)
    assert (found.repo, found.revision) == (repo, revision)
    assert str(found) == given


@pytest.mark.parametrize(
    "given",
    [
        *("Qwen3-8B", "./org/name", "../name", "~/name", "/name", "/org/name", "org/a/b", "a/"),
        *("org/name.", "org/na--me", "org/na..me", "org/.name", "org/na me", "org/name.git"),
        *("org", "org@main", "org/" + "n" * 97, "örg/name"),
    ],
)
def test_what_is_no_name_is_a_path(given: str, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "nobody"))
    assert parse("model_path", given) is None
    with pytest.raises(ConfigError, match=r"is not a folder\. Give the path") as refused:
        with_local_paths(EngineConfig(model_path=given))
    assert "org/name[@revision]" in str(refused.value)
    # An algorithm may read a file: it says itself what it misses.
    config = EngineConfig(speculative_draft_model_path=given, speculative_algorithm="X")
    passed = with_local_paths(config).speculative_draft_model_path
    assert passed == str(Path(given).expanduser())


@pytest.mark.parametrize(
    "setting", ["model_path", "tokenizer_path", "speculative_draft_model_path"]
)
def test_an_empty_path_is_not_the_current_folder(setting: str) -> None:
    with pytest.raises(ConfigError, match=f"{setting} is empty; leave it out"):
        EngineConfig(**{setting: " "}, speculative_algorithm="X")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"{setting} is empty; leave it out, or name"):
        parse(setting, " ")


@pytest.mark.parametrize("revision", ["", "a b", "..", "a/../../b", "/main", "-x", "a^", "x.lock"])
def test_impossible_revisions(revision: str) -> None:
    with pytest.raises(ConfigError, match=r"model_path .* cannot be a revision; give a branch"):
        parse("model_path", f"org/name@{revision}")


def test_a_local_folder_wins(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(GOLDEN / "target", tmp_path / "acme" / "base")
    shutil.copytree(GOLDEN / "target", tmp_path / "acme" / "base@v1")
    for name in ("acme/base", "acme/base@v1"):
        config = EngineConfig(model_path=name, tokenizer_path=name)
        assert with_local_paths(config) == config


def test_a_path_object_is_never_a_name(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"'{tmp_path}/acme/base' is not a folder"):
        LLM(Path("acme/base"))


def test_an_unknown_algorithm_is_refused_before_a_download() -> None:
    with pytest.raises(ConfigError, match="DFLASHH"):
        LLM("acme/base", speculative_algorithm="DFLASHH")


# --- progress -----------------------------------------------------------------------------------


def test_progress_without_a_terminal() -> None:
    now = 0.0
    screen = Console(file=io.StringIO(), soft_wrap=True)
    progress = DownloadProgress("acme/base", screen, clock=lambda: now)
    for count, seconds in ((1e6, 0.0), (1e6, 1.0), (1e6, SECONDS_PER_LINE), (5e9, 1.0), (1e6, 9.0)):
        now += seconds
        with progress:  # each in a part of its own
            progress.advance(count, 1e10)
    first, *more = screen.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert first.startswith("forerun: downloading acme/base: from https://")
    assert more == [
        "forerun: downloading acme/base: 3 MB so far",
        "forerun: downloading acme/base: 5,004 MB so far",
    ]


def test_progress_on_a_terminal() -> None:
    screen = Console(file=io.StringIO(), force_terminal=True, width=120)
    progress = DownloadProgress("acme/base", screen)
    with progress:
        pass
    assert screen.file.getvalue() == ""  # type: ignore[attr-defined]
    with progress:
        progress.advance(5e8, 1e9)
    shown = screen.file.getvalue()  # type: ignore[attr-defined]
    assert "Downloading acme/base" in shown
    assert "50%" in shown
    assert "0.5/1.0 GB" in shown
