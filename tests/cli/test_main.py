"""Exit codes and messages of the command itself."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

import forerun as package
from forerun import main
from forerun.__main__ import on_ctrl_c
from forerun.core.errors import ConfigError, ExecutorError, RequestError
from forerun.core.unsupported import RENAMED_SETTINGS


def test_help_names_every_command_and_does_not_import_torch() -> None:
    check = (
        "import sys; from forerun.main import run; code = run(['--help']);"
        "sys.exit(code or 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    for name in ("demo", "generate", "chat", "serve", "doctor", "bench", "train", "plan", "eval"):
        assert name in done.stdout


def test_no_arguments_show_the_help(forerun) -> None:
    assert "generate" in forerun().out


def test_version(forerun) -> None:
    result = forerun("--version")
    assert (result.code, result.out) == (0, f"forerun {package.__version__}\n")


def test_every_command_loads() -> None:
    for entry in main.COMMANDS.values():
        assert callable(entry.load())


@pytest.mark.parametrize("command", list(main.COMMANDS))
def test_every_command_has_help(forerun, command: str) -> None:
    result = forerun(command, "--help")
    assert result.code == 0
    assert f"forerun {command}" in result.out


LAUNCHERS = {
    "module": ["-m", "forerun"],
    "file": ["-m", "forerun.main"],
    # What pip writes for the entry point of pyproject.toml.
    "script": ["-c", "import sys; from forerun.__main__ import main; sys.exit(main())"],
}


def test_the_script_is_main() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert project["project"]["scripts"] == {"forerun": "forerun.__main__:main"}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("args", "code", "starts"),
    [
        (["--version"], 0, f"forerun {package.__version__}"),
        (["--help"], 0, "Usage: forerun "),
        ([], 0, "Usage: forerun "),
        (["genrate"], 2, "forerun: error: unknown command"),
    ],
)
def test_every_way_to_start_it_is_alike(args: list[str], code: int, starts: str) -> None:
    found = {
        name: subprocess.run(
            [sys.executable, *launcher, *args], capture_output=True, text=True, check=False
        )
        for name, launcher in LAUNCHERS.items()
    }
    module = found["module"]
    assert (module.stdout + module.stderr).strip().startswith(starts)
    for done in found.values():
        assert (done.returncode, done.stdout, done.stderr) == (code, module.stdout, module.stderr)


def test_an_unknown_command(forerun) -> None:
    error = forerun("genrate").error
    assert error.startswith("unknown command 'genrate'. Did you mean 'generate'? Known: demo,")


@pytest.mark.parametrize(
    ("given", "nearest"),
    [
        ("--page-siz", "--page-size"),
        ("--speculative-algoritm", "--speculative-algorithm"),
        ("--temprature", "--temperature"),
    ],
)
def test_an_unknown_flag_names_the_nearest(forerun, given: str, nearest: str) -> None:
    error = forerun("generate", given, "4", "hello").error
    assert error == f"No such option: {given}. Did you mean {nearest}?"


@pytest.mark.parametrize(
    ("given", "ours"),
    [("--tensor-parallel-size", "--tp-size"), ("--tp", "--tp-size"), ("--dp", "--dp-size"),
     *(("--enable-expert-parallel", "--ep-size"), ("--max-model-len", "--context-length")),
     *(("--ctx-size", "--context-length"), ("-c", "--context-length"), ("-m", "--model-path"))],
)  # fmt: skip
def test_a_flag_of_another_engine(forerun, given: str, ours: str) -> None:
    assert forerun("serve", given, "2").error == f"No such option: {given}. Did you mean {ours}?"


def test_the_temperature_of_llama_cpp(forerun) -> None:
    error = forerun("generate", "hi", "--temp", "0").error
    assert error == "No such option: --temp. Did you mean --temperature?"


def test_other_names_are_of_flags_that_the_command_has(forerun) -> None:
    known = forerun("serve", "--help").out + forerun("generate", "--help").out
    names = [ours.removeprefix("no_").replace("_", "-") for ours in RENAMED_SETTINGS.values()]
    assert not [name for name in names if f"--{name}" not in known]
    assert "tp-size" not in forerun("bench", "serving", "--tp", "2").error


@pytest.mark.parametrize(
    ("given", "answer"),
    [
        ("-tp", " -tp. Did you mean --tp-size?"),
        ("-hf", " -hf. Did you mean --model-path?"),  # -h is a flag, -f is none
        ("-md", " -md. Did you mean --speculative-draft-model-path?"),
        ("--no-enable-prefix-caching", ". Did you mean --disable-radix-cache?"),
        ("--seed", ". Did you mean --sampling-seed?"),
        ("--enable-lora", ": adapters cannot be loaded; merge the adapter into the model."),
        ("-ngl", " -ngl: all layers are on one device; leave it out, or set --device."),
        ("-zz", " -zz. See: forerun generate --help"),
        ("--prompt", " --prompt. See: forerun generate --help"),  # `prompts` is no flag
        ("--enable-auto-tool-choice", ". Did you mean --enable-trace?"),  # of `serve`
        ("-fa", " -fa: kernels are chosen by --attention-backend."),
    ],
)
def test_advice_about_a_flag_of_another_engine(forerun, given: str, answer: str) -> None:
    assert forerun("generate", "hi", given, "4").error.endswith(answer)


def test_advice_names_flags_of_the_command(forerun) -> None:
    error = forerun("serve", "--enable-auto-tool-choice").error
    assert error.endswith("for a model's own format set --tool-call-parser.")
    assert "tp" not in forerun("bench", "serving", "--pp", "2").error


@pytest.mark.parametrize("command", ["bench one-batch", "bench widths", "eval python"])
@pytest.mark.parametrize("flag", ["--no-speculative-adaptive", "--speculative-adaptive"])
def test_a_setting_that_a_command_decides(forerun, command: str, flag: str) -> None:
    error = forerun(*command.split(), flag).error
    assert error == f"No such option: {flag}: this command sets it itself; leave it out."


@pytest.mark.parametrize("flag", ["--model-path", "--tokenizer-path"])
def test_what_cannot_be_a_path(forerun, flag: str) -> None:
    error = forerun("generate", "hi", flag, "x" * 300).error
    assert error.endswith("cannot be a path: File name too long.")
    error = forerun("generate", "hi", flag, "~no-such-user/x").error
    assert "'~no-such-user/x' cannot be a path" in error


def test_an_unknown_flag_unlike_any_other(forerun) -> None:
    error = forerun("generate", "--xyzzy", "hello").error
    assert error == "No such option: --xyzzy. See: forerun generate --help"


def test_a_value_of_the_wrong_kind(forerun) -> None:
    assert "--page-size" in forerun("generate", "--page-size", "large", "hello").error
    error = forerun("bench", "one-batch", "--batch-size", "many").error
    assert error.endswith("See: forerun bench one-batch --help")


def test_a_flag_without_its_value(forerun) -> None:
    assert "--page-size" in forerun("generate", "hello", "--page-size").error


class Raising:
    """Stands in the table of commands; raises when it runs."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def load(self, subcommand: str | None):
        def command() -> None:
            raise self.error

        return command

    help = "raises"


@pytest.mark.parametrize("kind", [ConfigError, RequestError])
def test_our_errors_are_one_line_and_exit_2(forerun, monkeypatch, kind) -> None:
    monkeypatch.setitem(main.COMMANDS, "doctor", Raising(kind("it broke; fix it so.")))
    assert forerun("doctor").error == "it broke; fix it so."


def test_a_lost_engine_is_one_line_and_exits_1(forerun, monkeypatch) -> None:
    monkeypatch.setitem(main.COMMANDS, "doctor", Raising(ExecutorError("Rank 1 ended.")))
    result = forerun("doctor")
    assert (result.code, result.err) == (1, "forerun: error: Rank 1 ended.\n")


@pytest.mark.parametrize("group", ["eval", "bench"])
def test_a_group_lists_its_commands(forerun, group: str) -> None:
    assert forerun(group).error.startswith("Missing command. Known: ")
    assert "word-problems, python" in forerun("eval").error
    unknown = forerun(group, "serivng" if group == "bench" else "pyhton").error
    assert re.fullmatch(r"No such command '\w+'\. Did you mean '\S+'\? Known: .*\.", unknown)


def test_other_errors_are_bugs_and_keep_their_traceback(monkeypatch) -> None:
    monkeypatch.setitem(main.COMMANDS, "doctor", Raising(ZeroDivisionError("a bug")))
    with pytest.raises(ZeroDivisionError, match="a bug"):
        main.run(["doctor"])


def test_ctrl_c_is_130(forerun, monkeypatch) -> None:
    monkeypatch.setitem(main.COMMANDS, "doctor", Raising(KeyboardInterrupt()))
    assert forerun("doctor").code == 130


INTERRUPTED = """
import os, signal, sys
where, code, *sys.argv[1:] = sys.argv[1:]
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == where:
            print("torch" * ("torch" in sys.modules), end="", flush=True)
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
exec(code)
"""
COMMAND = "from forerun.__main__ import main; main()"


@pytest.mark.covering(0)
@pytest.mark.parametrize(
    ("module", "code", "args", "exits"),
    [
        ("typer", COMMAND, ["--version"], 130),
        ("numpy.lib", COMMAND, ["eval", "python"], 130),
        ("torch.nn", COMMAND, ["serve"], 130),
        ("numpy.lib", "from forerun import LLM", [], -signal.SIGINT),  # as Python ends
    ],
)
def test_ctrl_c_while_a_module_is_imported(
    module: str, code: str, args: list[str], exits: int
) -> None:
    """torch's C code imports numpy and swallows what is raised there: numpy comes before it."""
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, module, code, *args],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert (done.returncode, done.stdout) == (exits, "torch" * (module == "torch.nn"))
    assert done.stderr == "" or exits < 0


def test_ctrl_c_elsewhere_is_an_exception() -> None:
    with pytest.raises(KeyboardInterrupt):
        on_ctrl_c(signal.SIGINT, None)


def shell(line: str) -> tuple[int, str]:
    """Exit code, and what it says on standard error."""
    command = line.replace("forerun", f"{sys.executable} -m forerun", 1)
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    return done.returncode, done.stderr.removeprefix("forerun: error: ")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_full_device_is_one_line() -> None:
    says = "the output cannot be written: No space left on device.\n"
    assert shell("forerun --help > /dev/full") == (1, says)
    assert shell("forerun --help > /dev/full 2> /dev/full")[0] == 1


def test_closed_streams_are_one_line() -> None:
    says = "standard output is closed; redirect it to a file or to /dev/null.\n"
    assert shell("forerun --version >&-") == (2, says)
    assert shell("forerun --version <&-") == (0, "")
    assert shell("forerun --version 2>&-") == (0, "")


@pytest.mark.exhaustive
def test_ctrl_c_for_real() -> None:
    """While `generate -` waits for its prompt."""
    code = "import forerun.cli.generate, sys; print('ready', flush=True);"
    code += "from forerun.main import main; sys.argv = ['forerun', 'generate', '-']; main()"
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell's background jobs, and so tests run in one, ignore it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(1.0)  # it is reading by now; sooner is Ctrl-C all the same
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in err
