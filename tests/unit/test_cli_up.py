"""What `up` asks before it acts."""

from __future__ import annotations

import pytest
from serverworld import deployment

from deployer.cli.up import _asked, _found
from deployer.engine import Outcome
from deployer.model import Change, Plan, Shell, Where
from deployer.up_result import DeploymentResult

CHANGE = Plan.change("missing", Change("do it", "it is missing", Shell(Where.HOST, "true")))
NOTHING = Plan.nothing("fine")
BLOCKED = Plan.blocked("no", "mend it")
STANDS = Plan.blocked("no", "mend it", stands=True)
BAD_FILE = Plan.blocked("no such flag", "remove it", exit_code=2, stands=True)


@pytest.mark.parametrize(
    ("plans", "asks"),
    [
        ((NOTHING, CHANGE), True),
        ((CHANGE, BLOCKED), True),
        ((NOTHING, BLOCKED, CHANGE), False),
        ((CHANGE, STANDS), False),
        ((Plan.unknown("container"), BLOCKED), True),
    ],
)
def test_nobody_is_asked_to_agree_to_a_refusal(plans: tuple[Plan, ...], asks: bool) -> None:
    assert bool(_asked(deployment(), outcome_of(plans))) is asks


@pytest.mark.parametrize(
    ("several", "code"),
    [
        ([(NOTHING, NOTHING)], 0),
        ([(NOTHING, CHANGE)], 6),
        ([(NOTHING, NOTHING), (Plan.unknown("container"), BLOCKED)], 6),
        ([(CHANGE, BLOCKED)], 6),
        ([(CHANGE, STANDS)], 1),
        ([(NOTHING, CHANGE), (NOTHING, BLOCKED)], 1),
        ([(CHANGE, BAD_FILE)], 2),
        ([(CHANGE, BAD_FILE), (BLOCKED,)], 1),
    ],
)
def test_exit_code_of_a_plan_that_is_asked_to_tell(
    several: list[tuple[Plan, ...]], code: int
) -> None:
    results = [DeploymentResult(f"a/{at}", outcome_of(one)) for at, one in enumerate(several)]
    assert _found(results) == code


def outcome_of(plans: tuple[Plan, ...]) -> Outcome:
    return Outcome({str(number): plan for number, plan in enumerate(plans)})
