"""One intra-op thread or several: chosen again after every step of a small model on a CPU.

Several are faster while their cores are free. A thread that has lost its core to another process
holds up every operation that it takes part in, for milliseconds. Whether that happens shows only in
the times of steps, and it changes while a server runs.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

# Of a step's time on several threads over that on one: below which steps get several, and above
# which they get one again.
SEVERAL_PAY, ONE_PAYS = 0.9, 1.0
# Weights of a step's time among those before it.
ONE_WEIGHT, SEVERAL_WEIGHT, PROBE_WEIGHT = 1 / 8, 1 / 32, 1 / 4
LONGEST = 4.0  # times as long as on one thread: what a step on several counts at most
# Steps on several threads from one probe (on one thread) to the next. Those on one are probed
# sooner at first, and more and more rarely while several keep failing.
PROBE_INTERVAL, FIRST_PROBE, LAST_PROBE = 128, 8, 512
PROBED = 4  # steps of a probe on several threads; the first one finds the others asleep
SETTLED = 4  # steps of a kind in a row, after which it is timed on one thread if it never was


class ThreadTuner:
    """One thread or several for the next step, by the times of those before it.

    Times are compared among steps of one kind: of the same batch, tokens and operations. Now and
    then a step, or some of them, are a probe: they run the other way.
    """

    def __init__(self, most: int) -> None:
        self.count = self.several = most  # of the next step; where that is not one
        self.ratio = 1.0  # of a step's time on several threads over that on one
        self._on_one: dict[Hashable, float] = {}  # seconds by kind
        self._kind: Hashable = None  # of the last step
        self._alike = 0  # steps of that kind in a row
        self._pay = True  # several do
        self._since = self._unprobed = 0  # steps since that changed, and since the last probe
        self._probe = 0  # steps of a probe that are still to run
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
        self._pay = self.ratio < SEVERAL_PAY
        self.count = self.several if self._pay else 1

    def record(self, kind: Hashable, seconds: float) -> None:
        """The time of one step, which ran on `count` threads."""
        self._alike = self._alike + 1 if kind == self._kind else 1
        self._kind = kind
        self._since += 1
        self._unprobed += 1
        before = self._on_one.get(kind)
        if self.count == 1:
            # Of a step that something held up, as much as twice the time.
            weight = PROBE_WEIGHT if self._pay else ONE_WEIGHT
            change = 0.0 if before is None else weight * min(seconds - before, before)
            self._on_one[kind] = seconds if before is None else before + change
        elif before is not None and self._probe < PROBED:
            weight = SEVERAL_WEIGHT if self._pay else PROBE_WEIGHT
            self.ratio += weight * (min(seconds / before, LONGEST) - self.ratio)
            self._switch(self.ratio < (ONE_PAYS if self._pay else SEVERAL_PAY))
        self._probe = self._probe - 1 if self._probe else self._due(kind)
        self.count = self.several if self._pay != bool(self._probe) else 1

    def _switch(self, pay: bool) -> None:
        if pay == self._pay:
            return
        if self._pay and self._since >= PROBE_INTERVAL:  # several were good for long
            self._interval = FIRST_PROBE
        self._pay, self._since, self._unprobed, self._probe = pay, 0, 0, 0

    def _due(self, kind: Hashable) -> int:
        """Steps of a probe that begins now."""
        if self._pay:
            unknown = kind not in self._on_one and self._alike >= SETTLED
            steps = int(unknown or self._unprobed >= PROBE_INTERVAL)
        else:
            steps = PROBED if self._unprobed >= self._interval else 0
            self._interval = min(2 * self._interval, LAST_PROBE) if steps else self._interval
        self._unprobed = 0 if steps else self._unprobed
        return steps
