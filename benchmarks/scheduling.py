"""What clients see of four loads, if only scheduling differed: a simulated device, no GPU.

    python benchmarks/scheduling.py
    python benchmarks/scheduling.py --max-mixed-step-ms 0 --max-first-gap-ms 0

The second one decodes in every step. Engine and scheduler are the real ones; steps take what they
take for Qwen3-8B in bfloat16 on an H200 (`forerun_bench/simulated_load.py`). The figures are the
same on every machine.
"""

from __future__ import annotations

import argparse

from forerun.config.engine_config import EngineConfig
from forerun_bench.simulated_load import LOADS, simulate, table


def main() -> None:
    defaults = EngineConfig()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chunked-prefill-size", type=int, default=8192)
    parser.add_argument("--max-mixed-step-ms", type=int, default=defaults.max_mixed_step_ms)
    parser.add_argument("--max-first-gap-ms", type=int, default=defaults.max_first_gap_ms)
    given = parser.parse_args()
    reports = {
        load.name: simulate(
            load,
            chunk=given.chunked_prefill_size,
            max_mixed_step_ms=given.max_mixed_step_ms,
            max_first_gap_ms=given.max_first_gap_ms,
        )
        for load in LOADS
    }
    print(table(reports))


if __name__ == "__main__":
    main()
