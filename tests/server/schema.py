"""schemathesis against a live server: what its OpenAPI document allows, and what it does not.

    python -m tests.server.schema --examples 100

Exit code 1 if an answer is a 5xx, has a status, media type or shape that the document does not
name, or if the server does not refuse what the document forbids. `pip install schemathesis`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile

from tests.server.support import ENGINE, LiveServer, flags

CHECKS = (
    "not_a_server_error", "status_code_conformance", "content_type_conformance",
    "response_schema_conformance", "negative_data_rejection", "unsupported_method",
)  # fmt: skip
# Answers are short: most generated requests do not say how long.
SERVER = {**ENGINE, "context_length": 64, "max_n": 2}


def run(
    url: str, examples: int, seed: int, phases: str = "examples,coverage,fuzzing"
) -> subprocess.CompletedProcess[str]:
    """Runs schemathesis on a server that is up; exit code 0 if all checks hold."""
    with tempfile.TemporaryDirectory() as folder:  # it writes its cache into the current one
        return subprocess.run(
            [
                *(sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json"),
                *("--checks", ",".join(CHECKS), "--phases", phases),
                *("--max-examples", str(examples), "--seed", str(seed)),
                *("--warnings", "off", "--continue-on-failure", "--request-timeout", "60"),
            ],
            cwd=folder,
            capture_output=True,
            text=True,
        )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.server.schema", description=__doc__)
    parser.add_argument("--examples", type=int, default=100, help="per endpoint")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with LiveServer(*flags(**SERVER)) as server:
        done = run(server.url, options.examples, options.seed)
        server.wait_idle()
        print(done.stdout, done.stderr)
        if "Traceback" in server.output:
            print("a traceback in the server's log:", server.output[-5000:])
            return 1
    return done.returncode


if __name__ == "__main__":
    raise SystemExit(main())
