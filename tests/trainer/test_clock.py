"""The clock books every second once, to the innermost phase."""

from __future__ import annotations

import pytest

from areal_trainers import clock as clock_module
from areal_trainers.clock import PHASES, Clock


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    at = [100.0]
    monkeypatch.setattr(clock_module.time, "monotonic", lambda: at[0])
    return at


def test_an_inner_phase_is_taken_out_of_the_outer_one_and_the_rest_is_idle(now: list[float]) -> None:
    clock = Clock()
    now[0] += 1
    with clock("broadcast"):
        now[0] += 2
        with clock("gather"):
            now[0] += 4
        now[0] += 8
    now[0] += 16
    spent = clock.lap()
    assert spent == dict.fromkeys(PHASES, 0.0) | {"broadcast": 10.0, "gather": 4.0, "idle": 17.0}
    assert set(clock.lap().values()) == {0.0}


def test_a_phase_that_fails_still_ends(now: list[float]) -> None:
    clock = Clock()

    def work() -> None:
        with clock("step"):
            now[0] += 3
            raise KeyError

    with pytest.raises(KeyError):
        work()
    now[0] += 5
    assert (clock.lap()["step"], clock.lap()["idle"]) == (3.0, 0.0)


def test_the_device_is_waited_for_inside_the_phase(now: list[float]) -> None:
    def synchronize() -> None:
        now[0] += 7

    clock = Clock(synchronize)
    with clock("forward"):
        pass
    assert clock.lap()["forward"] == 7.0


def test_an_unknown_phase_is_an_error() -> None:
    with pytest.raises(ValueError, match="coffee"), Clock()("coffee"):
        pass
