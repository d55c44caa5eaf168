"""The API server's time: this machine's own clock may be a day off, and may be set at any moment."""

from __future__ import annotations

from email.utils import formatdate

import pytest

from everstep_operator.cluster.server_clock import CONFIRM_SECONDS, ServerClock

DAY = 86400.0
NOON = 1_767_268_800.0


class Machine:
    """Two clocks of this machine, and those of API servers."""

    def __init__(self, wrong: float) -> None:
        self.passed = 0.0
        self.wrong = wrong
        self.clock = ServerClock(lambda: 77.0 + self.passed, lambda: self.true + self.wrong)

    @property
    def true(self) -> float:
        return NOON + self.passed

    def ask(self, seconds: float = 0.05, ahead: float = 0.0) -> None:
        """One request that takes so long, to a server whose clock is so far ahead."""
        sent = self.clock.steady()
        self.passed += seconds
        self.clock.observe(formatdate(self.true + ahead, usegmt=True), sent)

    def error(self) -> float:
        return self.clock.now() - self.true


@pytest.mark.parametrize("wrong", [-DAY, 0.0, DAY])
def test_one_answer_is_enough(wrong: float) -> None:
    machine = Machine(wrong)
    machine.ask()
    assert abs(machine.error()) <= 1.1
    for _ in range(50):
        machine.passed += 2.37
        machine.ask()
        assert abs(machine.error()) <= 1.1
    machine.wrong += DAY  # somebody sets this machine's clock
    assert abs(machine.error()) <= 1.1


def test_an_answer_that_took_long_tells_no_wrong_time() -> None:
    machine = Machine(0.0)
    machine.ask()
    machine.ask(seconds=30.0)
    assert abs(machine.error()) <= 1.1


@pytest.mark.parametrize("ahead", [-DAY, DAY])
def test_a_jump_is_believed_only_when_it_stays(ahead: float) -> None:
    machine = Machine(0.0)
    machine.ask()
    for n in range(200):  # one of three API servers is wrong
        machine.passed += 2.0
        machine.ask(ahead=ahead if n % 3 == 0 else 0.0)
        assert abs(machine.error()) <= 1.1
    machine.passed += 2.0
    machine.ask(ahead=ahead)
    assert abs(machine.error()) <= 1.1
    machine.passed += CONFIRM_SECONDS
    machine.ask(ahead=ahead)
    assert abs(machine.error() - ahead) <= 1.1


@pytest.mark.parametrize("date", ["", "yesterday", "Thu, 99 Jan 2026 12:00:00 GMT"])
def test_what_is_no_date_teaches_nothing(date: str) -> None:
    machine = Machine(0.0)
    machine.ask()
    machine.clock.observe(date, machine.clock.steady())
    assert abs(machine.error()) <= 1.1
