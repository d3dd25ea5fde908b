"""Which verdicts of a training in progress are worth an alert."""

from __future__ import annotations

from dflash.report.trend import State, Verdict

CHECKS, PLAIN = 10, 4.5
"""Checks of a training per window, and |t| of a slope that one check is enough for; measured in docs/LOG.md."""


class Episode:
    """Which verdicts are news, out of those made every :data:`CHECKS`-th part of a window.

    A training asks dozens of times, and at one false verdict in twenty a third of all flat runs would raise an alarm.
    So a state counts once it held at every check of a whole window, or at once where it is plain: a trend beyond
    :data:`PLAIN` standard errors, or a cliff.

    A regression or a plateau is one episode, reported when it begins and once more if a plateau becomes a regression;
    the next one begins only after the run improved again. A plateau at the end of the learning rate is what is wanted
    there.
    """

    def __init__(self) -> None:
        self._reported: set[State] = set()
        self._last: State = "too short to say"
        self._count = 0

    def update(self, verdict: Verdict) -> bool:
        """True if an alert is due for this verdict, the newest of the run."""
        state = verdict.state
        self._count = self._count + 1 if state == self._last else 1
        self._last = state
        if state == "too short to say" or (self._count <= CHECKS and not is_plain(verdict)):
            return False
        if state == "improving":
            self._reported.clear()
            return False
        if state == "flat" and (verdict.lr_phase == "end" or self._reported):
            return False
        is_news = state not in self._reported
        self._reported.add(state)
        return is_news


def is_plain(verdict: Verdict) -> bool:
    """Whether one check is enough to believe the verdict; that a run stands still never is."""
    if verdict.state == "regressing" and any(not cliff.recovered for cliff in verdict.cliffs):
        return True
    if verdict.pooled is None or verdict.state not in ("improving", "regressing"):
        return False
    sign = 1 if verdict.state == "improving" else -1
    return max(sign * verdict.pooled.t, sign * verdict.pooled.recent_t) > PLAIN
