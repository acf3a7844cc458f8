"""What `up` asks before it acts."""

from __future__ import annotations

import pytest
from serverworld import deployment

from deployer.cli.up import _asked
from deployer.engine import Outcome
from deployer.model import Change, Plan, Shell, Where

CHANGE = Plan.change("missing", Change("do it", "it is missing", Shell(Where.HOST, "true")))
NOTHING = Plan.nothing("fine")
BLOCKED = Plan.blocked("no", "mend it")
STANDS = Plan.blocked("no", "mend it", stands=True)


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
    outcome = Outcome({str(number): plan for number, plan in enumerate(plans)})
    assert bool(_asked(deployment(), outcome)) is asks
