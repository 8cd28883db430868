"""What will be offered when a group that is asked for now is ready?

A damped trend of the recent rate (Holt) on top of what the same time of earlier seasons changed by. How far
it was off is measured at the very distance it is used at, and it is used only as far as that allows. Whole
numbers throughout; no more is kept than a season of intervals.
"""

from msgspec import Struct

from headrace.model.scaling import ForecastFacts
from headrace.model.scaling_spec import Forecasting, ppm
from headrace.units import MICRO, InstantNs, ceil_div, seconds

_ALPHA, _BETA, _DAMP, _OF = 6, 2, 18, 20
"""Weights of Holt's level and trend and what is left of a trend each interval, in twentieths: the level
follows within three intervals, the trend within ten, and a trend of one adds nine at most in all."""
_SEASON_KEEP = 4
"""A season counts a quarter against those before it."""
_SMOOTH = 4
"""Intervals on either side that a season's value is the mean of: single ones are noise."""
_CHECKED = 64
"""Errors that are kept: the last ones."""
_ENOUGH = 8
"""Errors from which on they say anything."""
_AHEAD_MAX = 120
"""Intervals that it looks ahead at most."""
_ACTUAL = 4
"""Intervals whose mean a forecast is held against."""
_UNKNOWN = -1


class History(Struct):
    """What was offered, by intervals: plain data, and all that a forecast keeps."""

    number: int | None = None
    """Of the interval that is open, from the clock's origin; None: nothing was ever offered."""
    open_ns: int = 0
    """Work offered in it."""
    recent: list[int] = []
    """Work rates of the last intervals, in millionths, newest last."""
    level: int = 0
    trend: int = 0
    """Change in an interval that the season does not explain."""
    season: list[int] = []
    """Work rate by interval of the season; -1: not seen yet."""
    made: list[tuple[int, int]] = []
    """(interval, work rate) of forecasts that are not checked yet, the oldest first."""
    errors: list[int] = []
    """Parts by which those that were checked were off, in millionths, newest last."""

    def add(self, settings: Forecasting, work_ns: int, now: InstantNs, ahead_ns: int) -> None:
        """Count work that was offered now; none of it closes intervals as well.

        `ahead_ns`: how far forecasts look, which each closed interval makes one of.
        """
        number = now // seconds(settings.interval_s)
        if self.number is None:
            self.number = number
        passed = number - self.number
        if passed > settings.slots:  # nobody has counted for a season: what was known is history
            self._forget(number)
        while self.number < number:
            self._close(settings)
            self._promise(settings, ahead_ns)
        self.open_ns += work_ns

    def _forget(self, number: int) -> None:
        self.number, self.open_ns, self.level, self.trend = number, 0, 0, 0
        self.recent, self.season, self.made, self.errors = [], [], [], []

    def _close(self, settings: Forecasting) -> None:
        """Learn from the open interval, and open the next."""
        assert self.number is not None
        rate = self.open_ns * MICRO // seconds(settings.interval_s)
        expected = self._change(settings, self.number - 1, self.number)
        if self.recent:
            before = self.level
            foreseen = before + expected + self.trend * _DAMP // _OF
            self.level = (rate * _ALPHA + foreseen * (_OF - _ALPHA)) // _OF
            risen = self.level - before - expected
            kept = self.trend * _DAMP // _OF
            self.trend = (risen * _BETA + kept * (_OF - _BETA)) // _OF
        else:
            self.level = rate
        self._check(rate)
        self._remember(settings, rate)
        self.number += 1
        self.open_ns = 0

    def _remember(self, settings: Forecasting, rate: int) -> None:
        assert self.number is not None
        self.recent = [*self.recent[-(_ACTUAL - 1) :], rate]
        if len(self.season) != settings.slots:
            self.season = [_UNKNOWN] * settings.slots
        slot = self.number % settings.slots
        known = self.season[slot]
        self.season[slot] = rate if known == _UNKNOWN else known + (rate - known) // _SEASON_KEEP

    def _check(self, rate: int) -> None:
        """Hold the forecasts for this interval against the mean of the last few."""
        assert self.number is not None
        last = [*self.recent[-(_ACTUAL - 1) :], rate]
        actual = sum(last) // len(last)
        while self.made and self.made[0][0] <= self.number:
            due, value = self.made.pop(0)
            if due == self.number:
                most = max(actual, value, 1)
                self.errors = [*self.errors[-(_CHECKED - 1) :], abs(actual - value) * MICRO // most]

    def _promise(self, settings: Forecasting, ahead_ns: int) -> None:
        """Note what is foreseen for an interval so far ahead, to be checked when it is over."""
        assert self.number is not None
        steps = min(_AHEAD_MAX, ceil_div(ahead_ns, seconds(settings.interval_s)))
        due = self.number - 1 + max(1, steps)
        if not self.made or self.made[-1][0] < due:
            self.made.append((due, self._foreseen(settings, max(1, steps))))

    def _change(self, settings: Forecasting, one: int, other: int) -> int:
        """Return by how much the season rises from one interval to another; 0 where it is not known."""
        here, there = self._season(settings, one), self._season(settings, other)
        return 0 if here is None or there is None else there - here

    def _season(self, settings: Forecasting, number: int) -> int | None:
        """Return the season's smoothed value at an interval; None: not all near it were seen."""
        if len(self.season) != settings.slots:
            return None
        near = [
            self.season[(number + off) % settings.slots] for off in range(-_SMOOTH, _SMOOTH + 1)
        ]
        return None if _UNKNOWN in near else sum(near) // len(near)

    def _foreseen(self, settings: Forecasting, steps: int) -> int:
        """Return the work rate so many intervals after the last closed one."""
        assert self.number is not None
        last = self.number - 1
        seasonal = self._change(settings, last, last + steps)
        trend, damped = self.trend, 0
        for _ in range(steps):
            trend = trend * _DAMP // _OF
            damped += trend
        known = self._season(settings, last + steps) or 0
        most = max(known, round(self.level * settings.rise_limit))
        return min(most, max(0, self.level + seasonal + damped))

    def facts(self, settings: Forecasting, ahead_ns: int) -> ForecastFacts | None:
        """Return what is foreseen for then, and how far that was off lately; None: nothing is known."""
        if not self.recent:
            return None
        steps = min(_AHEAD_MAX, max(1, ceil_div(ahead_ns, seconds(settings.interval_s))))
        checked = len(self.errors)
        return ForecastFacts(
            level_micro=self.level,
            at_landing_micro=self._foreseen(settings, steps),
            error_ppm=self._error() if checked >= _ENOUGH else None,
            checked=checked,
        )

    def _error(self) -> int:
        """Return the mean part by which it was off, or of the last few if that is more.

        One that has just been wrong is not believed for its past: after a burst it sees trends.
        """
        last = self.errors[-_ENOUGH:]
        return max(sum(self.errors) // len(self.errors), sum(last) // len(last))


def believed(settings: Forecasting, facts: ForecastFacts, now_micro: int) -> int:
    """Return the rate to prepare for: what is offered now, and as much of the foreseen rise as is trusted.

    In proportion to how far its error is below the limit; one that was never checked is not believed. What
    it still takes to be offered, and is not any more, is no rise.
    """
    if facts.error_ppm is None:
        return now_micro
    limit = ppm(settings.error_limit)
    trusted = max(0, limit - facts.error_ppm)
    rise = max(0, facts.at_landing_micro - max(now_micro, facts.level_micro))
    return now_micro + rise * trusted // limit
