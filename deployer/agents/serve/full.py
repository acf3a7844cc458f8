"""Every command of the agent."""

from __future__ import annotations

from deployer.agents.serve.drain import requests
from deployer.agents.serve.figures import generate, metrics, server_info
from deployer.agents.serve.leftovers import clear, held
from deployer.agents.serve.load import many
from deployer.agents.serve.main import BASIC, Actions
from deployer.agents.serve.stop import stop
from deployer.agents.serve.weights import weights

FULL: Actions = {
    **BASIC,
    "many": many,
    "server_info": lambda command: server_info(),
    "metrics": lambda command: metrics(),
    "generate": generate,
    "weights": weights,
    "stop": stop,
    "requests": requests,
    "held": held,
    "clear": clear,
}
