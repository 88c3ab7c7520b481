"""When a profile begins and ends, over an executor that only counts."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from forerun.core.errors import BusyError, RequestError
from forerun.core.plan import DecodeRequest, PrefillChunk, StepPlan
from forerun.core.profile import ProfileParams
from forerun.engine import profiling
from forerun.engine.profiling import MAX_SECONDS, MAX_STEPS, Profiling
from forerun.executor.profiling import report_process
from forerun.executor.profiling.recorder import StepRecorder

DECODE = StepPlan(decode=[DecodeRequest(0, 8)])
PREFILL = StepPlan(prefill=[PrefillChunk(0, 0, 4, True)])
MIXED = StepPlan(decode=DECODE.decode, prefill=PREFILL.prefill)


class Recording:
    """Which steps an executor would record."""

    def __init__(self) -> None:
        self.profiling = Profiling(self)  # type: ignore[arg-type]  # it calls no other method
        self.on = False
        self.stops = 0
        self.busy = 2  # answers until the files are written
        self.steps: list[int] = []
        self.count = 0

    def start_profile(self, params: ProfileParams) -> None:
        assert not self.on
        self.on = True

    def stop_profile(self) -> None:
        assert self.on
        self.on, self.stops = False, self.stops + 1

    def check_profile(self, name: str) -> None:
        assert name == "p"
        self.busy -= 1
        if self.busy >= 0:
            raise BusyError("later")

    def run(self, *plans: StepPlan) -> None:
        for plan in plans:
            self.profiling.before_step()
            if self.on:
                self.steps.append(self.count)
            self.count += 1
            self.profiling.after_step(plan)


def params(
    num_steps: int | None = None, start_step: int = 0, by_stage: bool = False
) -> ProfileParams:
    return ProfileParams("folder", "p", num_steps, start_step, by_stage=by_stage)


@pytest.mark.parametrize(
    ("given", "plans", "want"),
    [
        (params(2), [PREFILL, DECODE, DECODE], [0, 1]),
        (params(2, start_step=1), [PREFILL, DECODE, DECODE, DECODE], [1, 2]),
        (params(1, by_stage=True), [PREFILL, MIXED, DECODE, DECODE], [0, 1, 2]),
        (
            params(2, by_stage=True),
            [DECODE, DECODE, DECODE, MIXED, PREFILL, DECODE],
            [0, 1, 2, 3, 4],
        ),
        (params(), [DECODE] * (MAX_STEPS + 2), list(range(MAX_STEPS))),
        (params(MAX_STEPS, by_stage=True), [DECODE] * (MAX_STEPS + 2), list(range(MAX_STEPS))),
    ],
)
def test_recorded_steps(given: ProfileParams, plans: list[StepPlan], want: list[int]) -> None:
    recording = Recording()
    recording.profiling.start(given)
    recording.run(*plans)
    assert (recording.steps, recording.on, recording.stops) == (want, False, 1)
    assert recording.profiling.stop() == given  # once, though it has ended
    with pytest.raises(RequestError, match="No profile is running"):
        recording.profiling.stop()


def test_a_profile_ends_after_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    clock: Callable[[], float] = lambda: now[0]  # noqa: E731
    monkeypatch.setattr(profiling.time, "monotonic", clock)
    recording = Recording()
    recording.profiling.start(params())
    recording.run(DECODE)
    now[0] += MAX_SECONDS + 1
    recording.run(DECODE)
    assert (recording.steps, recording.on) == ([0], False)
    recording.profiling.start(params())
    now[0] += MAX_SECONDS + 1  # no step in between
    recording.profiling.start(params())
    assert recording.stops == 2 and recording.on


def test_what_runs_at_the_end_is_written(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recording = Recording()
    recording.profiling.close()  # nothing runs
    recording.profiling.start(params(start_step=5))
    recording.profiling.close()  # it has not begun
    assert recording.stops == 0
    recording = Recording()
    recording.profiling.start(params())
    recording.run(DECODE)
    recording.profiling.close()
    assert (recording.stops, recording.on) == (1, False) and recording.busy < 0
    recording = Recording()
    recording.profiling.start(params(1))
    recording.run(DECODE)  # it has ended by itself
    recording.profiling.close()
    assert recording.busy < 0
    monkeypatch.setattr(profiling, "CLOSE_SECONDS", 0.0)
    recording.busy = 10**6
    recording.profiling.start(params())
    recording.profiling.close()
    assert "The profile p is lost: Its files are not written after 0 s" in caplog.text


def test_an_error_at_the_end_of_a_profile_leaves_none_running(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail() -> None:
        raise ValueError("no device")

    recording = Recording()
    recording.profiling.start(params())
    monkeypatch.setattr(recording, "stop_profile", fail)
    with pytest.raises(ValueError, match="no device"):
        recording.profiling.stop()
    recording.on = False
    recording.profiling.start(params())
    assert recording.on


def test_the_files_are_waited_for() -> None:
    recording = Recording()
    recording.profiling.start(params())
    recording.run(DECODE)
    recording.profiling.wait_written(recording.profiling.stop())
    assert recording.busy < 0


# --- what the recorder of an executor keeps and writes -------------------------------------------


def recorded(folder: Path, recorder: StepRecorder | None = None, name: str = "p") -> StepRecorder:
    """A recorder that has recorded a step and ended."""
    recorder = recorder or StepRecorder(torch.device("cpu"))
    recorder.start(ProfileParams(str(folder), name, None))
    with recorder.step(DECODE):
        torch.ones(4).sum()
    recorder.stop()
    return recorder


def written(recorder: StepRecorder, name: str = "p") -> None:
    while True:
        try:
            return recorder.check(name)
        except BusyError:
            time.sleep(0.02)


def test_profiles_are_told_apart(tmp_path: Path) -> None:
    """Each has its own files, writer and error, also where two have one name."""
    (tmp_path / "file").touch()
    recorder = recorded(tmp_path / "file", name="failed")
    for name in ("p", "q", "p"):
        recorded(tmp_path, recorder, name)
    with pytest.raises(BusyError):
        recorder.check("never")
    written(recorder, "q")
    written(recorder, "p")
    with pytest.raises(RequestError, match="failed-TP-0 cannot be written"):
        written(recorder, "failed")
    names = {path.name for path in tmp_path.iterdir()}
    assert {f"{each}-TP-0.trace.json.gz" for each in "pq"} < names


def test_errors_of_the_profiler_are_told_by_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: torch.profiler.profile) -> None:
        stop(self)
        b"\x8b".decode()  # as PyTorch does with the names of code that is no longer there

    stop = torch.profiler.profile.stop
    with monkeypatch.context() as patch:
        patch.setattr(torch.profiler.profile, "stop", fail)
        recorder = recorded(tmp_path)
    with pytest.raises(RequestError, match="p-TP-0 cannot be written: 'utf-8' codec"):
        written(recorder)
    assert list(tmp_path.iterdir()) == []
    written(recorded(tmp_path))  # the next one is not affected
    assert {path.name for path in tmp_path.iterdir()} == {
        "p-TP-0.trace.json.gz",
        "p-TP-0.kernels.md",
    }


def test_a_trace_may_hold_any_bytes(tmp_path: Path) -> None:
    work = tmp_path / ".p"
    work.mkdir()
    event = b'{"ph": "X", "cat": "python_function", "name": "\xa0f\x01", "ts": 0, "dur": 1}'
    (work / report_process.RAW).write_bytes(b'{"traceEvents": [' + event + b"]}")
    params = {"folder": str(tmp_path), "name": "p", "num_steps": None}
    task = {"work": str(work), "stem": str(tmp_path / "p"), "device": "CPU", "params": params}
    assert report_process.answer(json.dumps(task).encode()) == b""
    with gzip.open(tmp_path / "p.trace.json.gz", "rt", encoding="utf-8") as file:
        assert "\N{REPLACEMENT CHARACTER}f" in file.read()
    assert not work.exists()
