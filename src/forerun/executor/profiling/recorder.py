"""Records the steps of this process with PyTorch's profiler, and writes traces and tables of them.

Recording begins and ends between two steps, in the thread that launches them. What is written then
is split and compressed by a process of its own (`report_process.py`).
"""

from __future__ import annotations

import json
import shutil
import tempfile
import threading
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path

import torch

from forerun.core.errors import BusyError, RequestError
from forerun.core.plan import StepPlan
from forerun.core.profile import CPU, DECODE_STEP, GPU, MIXED_STEP, PREFILL_STEP, ProfileParams
from forerun.executor.profiling import report_process
from forerun.executor.profiling.report_process import RAW
from forerun.platform.limited_process import (
    LimitedProcess,
    ProcessEndedError,
    ProcessTimeoutError,
)

MAX_ENDED = 100  # profiles that `check` knows
REPORT_SECONDS = 600.0  # until a report that is not written is given up
_ACTIVITIES = {
    CPU: torch.profiler.ProfilerActivity.CPU,
    GPU: torch.profiler.ProfilerActivity.CUDA,
}


class StepRecorder:
    """One recording at a time. Errors of the profiler and of the files are kept for `check`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.rank = 0  # in the names of files
        self._profiler: torch.profiler.profile | None = None
        self._params: ProfileParams | None = None
        # Of the last ones that have ended, by name: the thread that writes the files.
        self._ended: dict[str, threading.Thread | None] = {}
        self._errors: dict[str, str] = {}  # by name, until `check`

    def start(self, params: ProfileParams) -> None:
        """Records from the next step on."""
        names = [n for n in params.activities if n == CPU or self._device.type == "cuda"]
        self._params = params
        self._ended.pop(params.name, None)
        self._errors.pop(params.name, None)
        profiler = torch.profiler.profile(
            # The marks of steps are activities of the CPU.
            activities={_ACTIVITIES[name] for name in (*names, CPU)},
            record_shapes=params.record_shapes,
            with_stack=params.with_stack,
        )
        self._wait_for_device()  # steps in flight are not recorded
        try:
            profiler.start()
        except Exception as error:  # noqa: BLE001  whatever it is, no request ends with it
            self._errors[params.name] = f"PyTorch's profiler does not start: {error}"
            return
        self._profiler = profiler

    def step(self, plan: StepPlan) -> AbstractContextManager[object]:
        """Surrounds the launch of a step."""
        if self._profiler is None:
            return nullcontext()
        kind = PREFILL_STEP
        if plan.decode:
            kind = MIXED_STEP if plan.prefill else DECODE_STEP
        return torch.profiler.record_function(kind)

    def stop(self) -> None:
        """Ends the recording, and writes it. Waits for the device."""
        profiler, params = self._profiler, self._params
        self._profiler = None
        assert params is not None, "`start` is called before `stop`"
        writing = None if profiler is None else self._write(profiler, params)
        self._ended[params.name] = writing
        if len(self._ended) > MAX_ENDED:
            oldest = next(iter(self._ended))
            del self._ended[oldest]
            self._errors.pop(oldest, None)

    def _write(
        self, profiler: torch.profiler.profile, params: ProfileParams
    ) -> threading.Thread | None:
        """Returns the thread that writes the files, unless there is nothing to write."""
        stem = Path(params.folder) / f"{params.name}-TP-{self.rank}"
        work: Path | None = None  # hidden, until its files are complete
        try:
            self._wait_for_device()
            profiler.stop()
            stem.parent.mkdir(parents=True, exist_ok=True)
            work = Path(tempfile.mkdtemp(prefix=f".{stem.name}-", dir=stem.parent))
            profiler.export_chrome_trace(str(work / RAW))
        except Exception as error:  # noqa: BLE001  as in `start`
            if work is not None:
                shutil.rmtree(work, ignore_errors=True)
            self._errors[params.name] = f"The trace {stem} cannot be written: {error}"
            return None
        thread = threading.Thread(target=self._report, args=(work, stem, params), daemon=True)
        thread.start()
        return thread

    def check(self, name: str) -> None:
        """Any thread may call it. `name`: of a recording that was stopped.

        Raises:
            BusyError: files are still being written.
            RequestError: something was not recorded or not written.
        """
        writing = self._ended.get(name)
        if name not in self._ended or (writing is not None and writing.is_alive()):
            raise BusyError("The profile is still being written; try again later.")
        error = self._errors.pop(name, None)
        if error is not None:
            raise RequestError(error)

    def _wait_for_device(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _report(self, work: Path, stem: Path, params: ProfileParams) -> None:
        """Body of a thread."""
        task = {
            "work": str(work),
            "stem": str(stem),
            "device": _name(self._device),
            "params": asdict(params),
        }
        try:
            process = LimitedProcess(str(report_process.__file__))
            answer = process.ask(json.dumps(task).encode(), REPORT_SECONDS)
            process.close()
        except (ProcessTimeoutError, ProcessEndedError) as error:
            answer = str(error).encode()
        if answer:
            shutil.rmtree(work, ignore_errors=True)
            self._errors[params.name] = f"The trace {stem} cannot be written: {answer.decode()}."


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
