"""The device side of a step, and what it works on."""
