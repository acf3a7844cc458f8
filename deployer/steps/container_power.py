"""Start, stop and restart of a container on the host, as data; each with a deadline.

A container of the HA manager is only asked for: pct answers at once with success, and what happened
is seen by polling.
"""

from __future__ import annotations

from deployer.model import Change, Shell, Where
from deployer.shell import assignments

START_DEADLINE_S = 120
HA_DEADLINE_S = 300
"""The HA manager acts in rounds of ten seconds, on the node where it finds the container."""
SHUTDOWN_S = 60

# pct may answer before the task is done (HA), and `running` does not mean that it can be entered.
_WAIT = r"""
wait_for() {
  stop=$(($(date +%s) + DEADLINE))
  until "$@"; do
    if [ "$(date +%s)" -ge "$stop" ]; then
      echo "container $VMID: $* was not reached in $DEADLINE s: $(pct status "$VMID" 2>&1)" >&2
      return 1
    fi
    sleep 1
  done
}
stopped() { [ "$(pct status "$VMID" 2>/dev/null)" = "status: stopped" ]; }
running() { [ "$(pct status "$VMID" 2>/dev/null)" = "status: running" ]; }
# In a frozen or hung guest a command never ends.
answering() { timeout 10 pct exec "$VMID" -- true </dev/null >/dev/null 2>&1; }
start() {
  running || pct start "$VMID" || running || return 1
  wait_for running && wait_for answering
}
halt() {
  stopped || pct shutdown "$VMID" --timeout "$SHUTDOWN" --forceStop 1 || stopped || return 1
  wait_for stopped
}
"""


def _shell(vmid: int, ha: str, what: str, rounds: int) -> Shell:
    deadline = HA_DEADLINE_S if ha else START_DEADLINE_S
    values = {"VMID": str(vmid), "DEADLINE": str(deadline), "SHUTDOWN": str(SHUTDOWN_S)}
    timeout = rounds * deadline + SHUTDOWN_S + 120.0
    return Shell(Where.HOST, assignments(values) + _WAIT + what + "\n", timeout)


def start(vmid: int, reason: str, ha: str = "") -> Change:
    """Starts the container and waits until commands run in it."""
    title = f"start container {vmid}" + (" through the HA manager" if ha else "")
    return Change(title, reason, _shell(vmid, ha, "start", 2), f"pct shutdown {vmid}")


def restart(vmid: int, reason: str, ha: str = "") -> Change:
    """Shuts the container down (by force after a minute), starts it and waits likewise."""
    title = f"restart container {vmid}" + (" through the HA manager" if ha else "")
    return Change(title, reason, _shell(vmid, ha, "halt && start", 3))


def start_shell(vmid: int, ha: str = "") -> Shell:
    """The script of `start`, for putting a state back."""
    return _shell(vmid, ha, "start", 2)


def halt_shell(vmid: int, ha: str = "") -> Shell:
    """Shuts the container down, for putting a state back."""
    return _shell(vmid, ha, "halt", 1)
