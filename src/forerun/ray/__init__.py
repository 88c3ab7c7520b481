"""Ray Serve: replicas on several machines, behind the same HTTP API.

`forerun.ray:deployment` is an application builder for `serve run` and Serve's YAML. Ray is imported
when it is called: nothing else of Forerun needs it.
"""

from __future__ import annotations

from forerun.ray.deployment import deployment

__all__ = ["deployment"]
