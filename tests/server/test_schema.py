"""The server does what its OpenAPI document says. `schema.py` runs more examples."""

from __future__ import annotations

import pytest

from tests.server.schema import SERVER, run
from tests.server.support import LiveServer, flags

pytest.importorskip("schemathesis")


@pytest.mark.parametrize(
    ("examples", "phases"),
    [(2, "fuzzing"), pytest.param(20, "coverage,fuzzing", marks=pytest.mark.exhaustive)],
)
@pytest.mark.timeout(1200)
def test_the_openapi_document_holds(examples: int, phases: str) -> None:
    with LiveServer(*flags(**SERVER)) as server:
        done = run(server.url, examples, seed=1, phases=phases)
        server.wait_idle()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in server.output
