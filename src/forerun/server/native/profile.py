"""`/start_profile` and `/stop_profile`: traces of a running server's steps, as SGLang has them."""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

from fastapi import APIRouter
from pydantic import BeforeValidator, Field
from starlette.responses import Response

from forerun.core.errors import ConfigError, RequestError, shown
from forerun.core.profile import CPU, GPU, ProfileParams
from forerun.engine.profiling import MAX_STEPS
from forerun.server.http.auth import check_admin
from forerun.server.http.errors import json_response
from forerun.server.http.strict_model import Many, StrictModel, Unsupported
from forerun.server.service import Service

OFF = "The server writes no profiles: start it with --torch-profiler-dir DIR."
FILE = r"(-DP-\d+)?-TP-\d+(-[A-Z]+)?\.(trace\.json\.gz|kernels\.md)"  # what follows its name
NAME = r"^[\w-][\w.-]{0,63}$"  # a part of files' names


def _number(value: Any) -> Any:
    """SGLang's own client sends numbers as text."""
    return int(value) if isinstance(value, str) and re.fullmatch(r"[0-9]{1,9}", value) else value


Number = Annotated[int, BeforeValidator(_number)]


class StartProfile(StrictModel):
    """`POST /start_profile`."""

    unsupported: ClassVar[Unsupported] = {
        "merge_profiles": ((False,), "each rank has a trace of its own"),
        "profile_stages": ((), "profile_by_stage tells all stages apart"),
    }
    output_dir: str | None = Field(
        None, description="Folder in --torch-profiler-dir, or below it; default: that one"
    )
    num_steps: Number | None = Field(
        None, ge=1, le=MAX_STEPS, description="Steps to record; default: until /stop_profile"
    )
    start_step: Number | None = Field(
        None, ge=0, description="Steps from now before the first one that is recorded"
    )
    activities: Many[str] | None = Field(None, description="CPU, GPU; default: both")
    profile_by_stage: bool = Field(
        False, description="Files of their own for steps with prompt tokens and those without"
    )
    with_stack: bool | None = Field(None, description="Record lines of Python code")
    record_shapes: bool | None = Field(None, description="Record shapes of operators' inputs")
    profile_prefix: str | None = Field(
        None, pattern=NAME, description="First part of the files' names"
    )
    profile_id: str | None = Field(
        None, pattern=NAME, description="Next part of the files' names; default: the time"
    )


@dataclass
class ProfileFolder:
    """Where traces may be written."""

    root: Path
    last: Path | None = None  # folder and common name of the last one

    def __post_init__(self) -> None:
        """
        Raises:
            ConfigError: the folder cannot be made or written.
        """
        try:
            self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise _cannot_be_written(self.root, error.strerror) from None
        self.root = self.root.resolve()
        if not os.access(self.root, os.W_OK | os.X_OK):
            raise _cannot_be_written(self.root, "Permission denied")

    def make(self, output_dir: str | None) -> Path:
        """Returns a folder in the root, which it makes.

        Raises:
            RequestError: it lies elsewhere, or cannot be written.
        """
        try:
            path = (self.root / (output_dir or "")).resolve()
            if not path.is_relative_to(self.root):
                raise RequestError(
                    f"output_dir {shown(output_dir)} lies outside of --torch-profiler-dir"
                    f" {self.root}; leave it out, or name a folder in that one."
                )
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
        except (OSError, ValueError) as error:
            if isinstance(error, RequestError):
                raise
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise RequestError(
                f"output_dir {shown(output_dir)} cannot be written: {reason}."
            ) from None
        if not os.access(path, os.W_OK | os.X_OK):
            raise RequestError(f"output_dir {shown(output_dir)} cannot be written.")
        return path

    @staticmethod
    def files(stem: Path | None) -> list[str]:
        """The files of a profile, on this machine, as far as they are still there."""
        if stem is None:
            return []
        named = re.compile(re.escape(stem.name) + FILE)
        folder = stem.parent
        names = os.listdir(folder) if folder.is_dir() else []
        return sorted(str(folder / name) for name in names if named.fullmatch(name))


def _cannot_be_written(path: Path, reason: str | None) -> ConfigError:
    return ConfigError(f"torch_profiler_dir {shown(str(path))} cannot be written: {reason}.")


def profile_router(service: Service) -> APIRouter:
    router = APIRouter()
    setting = service.settings.torch_profiler_dir
    folder = None if setting is None else ProfileFolder(Path(setting))
    engine = service.engine

    def checked_folder() -> ProfileFolder:
        check_admin()
        if folder is None:
            raise RequestError(OFF)
        return folder

    async def start_profile(body: StartProfile | None = None) -> Response:
        """Records the steps of every engine from now on."""
        allowed, asked = checked_folder(), body or StartProfile.model_validate({})
        is_cpu = str(engine.info.explain["device"]) == "cpu"
        activities = _activities(asked, is_cpu)
        path = allowed.make(asked.output_dir)
        params = _params(asked, path, activities)
        await engine.start_profile(params)
        allowed.last = path / params.name
        return _answer("Profiling has started.", profile_id=params.name, output_dir=str(path))

    async def stop_profile() -> Response:
        """Ends the profile, and answers once its files are written."""
        allowed = checked_folder()
        stem = allowed.last  # another one may start before the files of this one are written
        problems = await engine.stop_profile()
        return _answer(" ".join(["Profiling has ended.", *problems]), files=allowed.files(stem))

    for path, endpoint in (("/start_profile", start_profile), ("/stop_profile", stop_profile)):
        router.add_api_route(path, endpoint, methods=["POST"])
        router.add_api_route(path, endpoint, methods=["GET"], include_in_schema=False)
    return router


def _activities(asked: StartProfile, is_cpu: bool) -> tuple[str, ...]:
    """
    Raises:
        RequestError: an activity does not exist, or nothing would be recorded.
    """
    activities = tuple(asked.activities) if asked.activities is not None else (CPU, GPU)
    for name in activities:
        if name not in (CPU, GPU):
            raise RequestError(f"activities are {CPU} and {GPU}, got {shown(name)}.")
    if not activities or (is_cpu and CPU not in activities):
        what = "This engine runs on a CPU: " if is_cpu else ""
        raise RequestError(f"{what}activities {shown(list(activities))} record nothing; add {CPU}.")
    return activities


def _params(asked: StartProfile, folder: Path, activities: tuple[str, ...]) -> ProfileParams:
    prefix = f"{asked.profile_prefix}-" if asked.profile_prefix else ""
    return ProfileParams(
        folder=str(folder),
        name=prefix + (asked.profile_id or f"{time.time():.6f}"),
        num_steps=asked.num_steps,
        start_step=asked.start_step or 0,
        activities=activities,
        by_stage=asked.profile_by_stage,
        with_stack=bool(asked.with_stack),
        record_shapes=bool(asked.record_shapes),
    )


def _answer(message: str, **more: Any) -> Response:
    return json_response({"success": True, "message": message, **more})
