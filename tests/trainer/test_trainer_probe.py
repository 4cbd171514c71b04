"""The probe after an update: what it lets pass, and what stops the run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from areal_agent.errors import GatewayError, TrainerError
from areal_agent.trajectory import Batch, Sequence
from areal_trainers.batch import Gap
from areal_trainers.probe import Probe

BATCH = Batch(
    "lease",
    0,
    (
        Sequence(
            token_ids=[1, 2],
            logprobs=[0.0, -1.0],
            versions=[-1, 0],
            loss_mask=[False, True],
            temperature=1.0,
            reward=1.0,
            session_id="s",
            group_id="g",
            task_id="t",
        ),
    ),
)
REPLY = {"engine": "engine-0", "prompt_ids": [1], "token_ids": [2], "logprobs": [-1.0], "versions": [1]}


def probe_of(answer: list[dict[str, Any]] | GatewayError) -> Probe:
    class Client:
        def probe(self, *_: object) -> list[dict[str, Any]]:
            if isinstance(answer, GatewayError):
                raise answer
            return answer

    class Alone:
        broadcast_bytes = staticmethod(bytes)

    class Learner:
        def logprobs(self, items: list[object]) -> tuple[list[np.ndarray], float]:
            return [np.array([-1.0]) for _ in items], 0.0

    return Probe(Client(), Alone(), Learner(), 1e-2)  # type: ignore[arg-type]


@pytest.mark.parametrize(("status", "code"), [(502, ""), (503, ""), (504, ""), (0, "no_answer")])
def test_engines_that_could_not_be_asked_do_not_stop_the_run(
    status: int, code: str, capsys: pytest.CaptureFixture[str]
) -> None:
    refused = GatewayError("too busy", status=status, code=code)
    assert probe_of(refused).check(BATCH, 1) == Gap(0.0, 0)
    assert capsys.readouterr().out.count("not compared after this step: too busy") == 1


def test_other_refusals_and_what_engines_get_wrong_do() -> None:
    assert probe_of([REPLY]).check(BATCH, 1) == Gap(0.0, 1)
    with pytest.raises(GatewayError, match="wrong key"):
        probe_of(GatewayError("wrong key", status=401)).check(BATCH, 1)
    with pytest.raises(TrainerError, match=r"disagree by 0\.5 nats"):
        probe_of([REPLY | {"logprobs": [-1.5]}]).check(BATCH, 1)
    with pytest.raises(TrainerError, match="with versions"):
        probe_of([REPLY | {"versions": [0]}]).check(BATCH, 1)
