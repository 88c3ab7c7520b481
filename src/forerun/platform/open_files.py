"""The limit of open files of this process."""

from __future__ import annotations

OTHERS = 256  # files, sockets and libraries that are no connections


def allow_connections(count: int) -> None:
    """Raises the soft limit as far as it may be for so many connections: each is a file.

    Many systems allow 1,024 at first. Does nothing on Windows, which has no such limit.
    """
    try:
        import resource
    except ModuleNotFoundError:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + OTHERS
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
