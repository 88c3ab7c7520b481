"""The server does what its OpenAPI document says. `schema.py` runs more examples."""

from __future__ import annotations

import pytest

from tests.server.schema import SERVER, run
from tests.server.support import LiveServer, flags

pytest.importorskip("schemathesis")


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_the_openapi_document_holds() -> None:
    with LiveServer(*flags(**SERVER)) as server:
        done = run(server.url, examples=5, seed=1, phases="fuzzing")
        server.wait_idle()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in server.output
