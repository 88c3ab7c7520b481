"""Reads the JSON of `forerun demo --json`: the texts are identical, and speculation pays."""

import json
import sys

report = json.load(sys.stdin)
identical, speedup = report["identical"], report["speedup"]
print(f"demo: identical {identical}, speed-up {speedup:.2f}")
if identical is not True or speedup < 2:
    sys.exit("forerun demo: expected identical texts and a speed-up of at least 2")
