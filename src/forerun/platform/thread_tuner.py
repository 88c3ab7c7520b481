"""One intra-op thread or several: chosen again after every step of a small model on a CPU.

Several are faster while their cores are free. A thread that has lost its core to another process
holds up every operation that it takes part in, for milliseconds. Whether that happens shows only in
the times of steps, and it changes while a server runs.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

# Time of a step on several threads over its time on one: below the first steps get several threads,
# above the second one again.
SEVERAL_BELOW, ONE_ABOVE = 0.9, 1.0
# Weights of a step's time among those before it.
ONE_WEIGHT, SEVERAL_WEIGHT, PROBE_WEIGHT = 1 / 8, 1 / 32, 1 / 4
LONGEST = 4.0  # times as long as on one thread: what a step on several counts at most
# Steps on several threads from one probe (on one thread) to the next. Those on one are probed
# sooner at first, and more and more rarely while several keep failing.
PROBE_INTERVAL, FIRST_PROBE, LAST_PROBE = 128, 8, 512
PROBE_STEPS = 4  # steps of a probe on several threads; the first one finds the others asleep
SETTLED = 4  # steps of a kind in a row, after which it is timed on one thread if it never was


class ThreadTuner:
    """One thread or several for the next step, by the times of those before it.

    Times are compared among steps of one kind: of the same batch, tokens and operations. Now and
    then a step, or a few, are a probe: on one thread instead of several, or the other way round.
    """

    def __init__(self, most: int) -> None:
        self.count = most  # threads of the next step
        self.several = most  # what it is where it is not 1
        self.ratio = 1.0  # of a step's time on several threads over that on one
        self._on_one: dict[Hashable, float] = {}  # seconds by kind
        self._kind: Hashable = None  # of the last step
        self._alike = 0  # steps of that kind in a row
        self._uses_several = True  # but for probes
        self._since_switch = 0  # steps since that changed
        self._since_probe = 0  # steps from the last probe on
        self._probe_left = 0  # steps of a probe that are still to run
        self._interval = FIRST_PROBE  # of probes while one thread is used

    def measure(self, seconds: Callable[[int], float]) -> None:
        """Compares 1, 2, 4, ... and `most` threads by what one step takes with each.

        Ends with the first number of threads that is slower than the one before it.
        """
        one = shortest = seconds(1)
        counts = [1 << n for n in range(1, self.several.bit_length())]
        for count in dict.fromkeys([*counts, self.several]):
            taken = seconds(count)
            if count > 2 and taken >= shortest:
                break
            shortest, self.several = taken, count
        self.ratio = shortest / one
        self._uses_several = self.ratio < SEVERAL_BELOW
        self.count = self.several if self._uses_several else 1

    def record(self, kind: Hashable, seconds: float) -> None:
        """The time of one step, which ran on `count` threads."""
        self._alike = self._alike + 1 if kind == self._kind else 1
        self._kind = kind
        self._since_switch += 1
        self._since_probe += 1
        if self.count == 1:
            on_one = self._on_one.get(kind, seconds)
            weight = PROBE_WEIGHT if self._uses_several else ONE_WEIGHT
            # A step that something held up counts as twice the time at most.
            self._on_one[kind] = on_one + weight * min(seconds - on_one, on_one)
        elif kind in self._on_one and self._probe_left < PROBE_STEPS:
            weight = SEVERAL_WEIGHT if self._uses_several else PROBE_WEIGHT
            self.ratio += weight * (min(seconds / self._on_one[kind], LONGEST) - self.ratio)
            self._switch(self.ratio < (ONE_ABOVE if self._uses_several else SEVERAL_BELOW))
        self._probe_left = self._probe_left - 1 if self._probe_left else self._due(kind)
        self.count = self.several if self._uses_several != bool(self._probe_left) else 1

    def _switch(self, several: bool) -> None:
        if several == self._uses_several:
            return
        if self._uses_several and self._since_switch >= PROBE_INTERVAL:  # it was good for long
            self._interval = FIRST_PROBE
        self._uses_several = several
        self._since_switch = self._since_probe = self._probe_left = 0

    def _due(self, kind: Hashable) -> int:
        """Steps of a probe that begins now."""
        if self._uses_several:
            unknown = kind not in self._on_one and self._alike >= SETTLED
            steps = int(unknown or self._since_probe >= PROBE_INTERVAL)
        else:
            steps = PROBE_STEPS if self._since_probe >= self._interval else 0
            if steps:
                self._interval = min(2 * self._interval, LAST_PROBE)
        if steps:
            self._since_probe = 0
        return steps
