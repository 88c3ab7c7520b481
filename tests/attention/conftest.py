"""As for the kernels: on the GPU if there is one, else in Triton's interpreter."""

from tests.kernels.conftest import _interpreter, device

__all__ = ["_interpreter", "device"]
