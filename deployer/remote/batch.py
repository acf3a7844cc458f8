"""All probes of one target in one script, over one channel, framed (DESIGN section 3).

Each probe runs in its own subshell in the background, with stdin from /dev/null, its own two output
files and its own deadline. A probe that hangs, even in D state, is left behind: the script never
waits for it after its deadline. The temp folder (a tmpfs when there is one, so that a full disk can
still be diagnosed) is removed at the end; nothing else on the target changes.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Sequence

from deployer import errors
from deployer.model import Probe, ProbeOutput
from deployer.remote.transport import Answer, Transport
from deployer.shell import quote

OUTPUT_LIMIT_BLOCKS = 16384
"""Most output of a probe, in 512-byte blocks (8 MiB); one that writes more is killed."""

_SETUP = r"""_b_dir=
for _b_base in /dev/shm /run /tmp /var/tmp; do
  _b_dir=$(mktemp -d "$_b_base/deployer-probe.XXXXXXXXXX" 2>/dev/null) && break
done
if [ -z "$_b_dir" ] || ! mkfifo "$_b_dir/done"; then
  printf '\n%s:fail:no folder for temporary files in /dev/shm, /run, /tmp, /var/tmp\n' "$_b_mark"
  exit 70
fi
exec 3<>"$_b_dir/done"
_b_timer=
_b_kill() {
  # $1 and all its descendants, found by parent pid; needs neither setsid nor timeout. /proc is read
  # once: a busy host has thousands of processes.
  _b_table=
  for _b_stat in /proc/[0-9]*/stat; do
    { read -r _b_line <"$_b_stat"; } 2>/dev/null || continue
    _b_rest=${_b_line##*) ? }
    _b_table="$_b_table ${_b_line%% *}:${_b_rest%% *}"
  done
  _b_all=$1
  _b_level=" $1 "
  while [ -n "$_b_level" ]; do
    _b_below=
    for _b_entry in $_b_table; do
      case $_b_level in
        *" ${_b_entry#*:} "*) _b_below="$_b_below${_b_entry%%:*} " ;;
      esac
    done
    _b_all="$_b_all $_b_below"
    _b_level=${_b_below:+ $_b_below}
  done
  # shellcheck disable=SC2086
  kill -9 $_b_all 2>/dev/null
}
_b_end() {
  [ -z "$_b_timer" ] || kill "$_b_timer" 2>/dev/null
  rm -rf "$_b_dir"
}
trap _b_end EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM
# Nobody reads any more: the connection was cut.
trap 'exit 141' PIPE
"""

_WAIT = r"""while [ "$_b_left" -gt 0 ] && read -r _b_what _b_id _b_code <&3; do
  if [ "$_b_what" = d ]; then
    eval "_b_seen=\$_b_state_$_b_id"
    [ -z "$_b_seen" ] || continue
    eval "_b_state_$_b_id=\$_b_code"
    _b_left=$((_b_left - 1))
    continue
  fi
  eval "_b_late=\$_b_late_$_b_id"
  for _b_id in $_b_late; do
    eval "_b_seen=\$_b_state_$_b_id; _b_pid=\$_b_pid_$_b_id"
    [ -z "$_b_seen" ] || continue
    eval "_b_state_$_b_id=timeout"
    _b_left=$((_b_left - 1))
    _b_kill "$_b_pid"
  done
done
set --
_b_id=0
while [ "$_b_id" -lt "$_b_count" ]; do
  eval "_b_seen=\$_b_state_$_b_id"
  _b_base=$_b_dir/$_b_id
  printf '\n%s:out:%s\n' "$_b_mark" "$_b_id" >"$_b_base.a"
  printf '\n%s:err:%s\n' "$_b_mark" "$_b_id" >"$_b_base.b"
  printf '\n%s:exit:%s:%s\n' "$_b_mark" "$_b_id" "$_b_seen" >"$_b_base.c"
  set -- "$@" "$_b_base.a" "$_b_base.o" "$_b_base.b" "$_b_base.e" "$_b_base.c"
  _b_id=$((_b_id + 1))
done
[ "$#" -eq 0 ] || cat "$@"
"""


class ProbeFailed(errors.DeployError):
    """A probe's answer could not be read: its parser raised, or its frame is malformed."""


def batch_script(probes: Sequence[Probe], nonce: str, prelude: str = "") -> str:
    """One POSIX sh script that runs all probes at once and prints their framed answers.

    `prelude` runs before, inline (it may `exit`). `nonce` must be a word that no output can
    contain: use `new_nonce()`.
    """
    if not (nonce.isascii() and nonce.isalnum()):
        raise ValueError(f"not a nonce: {nonce!r}")
    names = [probe.name for probe in probes]
    if len(set(names)) != len(names):
        raise ValueError(f"probe names are not unique: {sorted(names)}")
    lines = [f"_b_mark='@{nonce}'\n"]
    if prelude:
        lines.append(f"printf '\\n%s:prelude\\n' \"$_b_mark\"\n{prelude.rstrip()}\n")
    lines.append(f"{_SETUP}_b_count={len(probes)}\n_b_left={len(probes)}\n")
    lines.extend(_launch(index, probe) for index, probe in enumerate(probes))
    lines.append(_timer(probes))
    lines.append(_WAIT)
    lines.append("printf '\\n%s:end\\n' \"$_b_mark\"\n")
    return "".join(lines)


def _launch(index: int, probe: Probe) -> str:
    # `eval` keeps a syntax error of one snippet inside its subshell, without an exec.
    return (
        f"_b_state_{index}=\n"
        f"{{ ( exec 3>&-; trap - EXIT HUP INT TERM PIPE; ulimit -f {OUTPUT_LIMIT_BLOCKS}\n"
        f'eval {quote(probe.script)}\n) 3>&-; echo "d {index} $?" >&3; }} '
        f'</dev/null >"$_b_dir/{index}.o" 2>"$_b_dir/{index}.e" &\n'
        f"_b_pid_{index}=$!\n"
    )


def _timer(probes: Sequence[Probe]) -> str:
    """One background timer that announces each distinct deadline in turn."""
    by_deadline: dict[float, list[str]] = {}
    for index, probe in enumerate(probes):
        by_deadline.setdefault(probe.timeout_s, []).append(str(index))
    if not by_deadline:
        return ""
    lists, ticks, before = [], [], 0.0
    for number, deadline in enumerate(sorted(by_deadline)):
        lists.append(f"_b_late_{number}={quote(' '.join(by_deadline[deadline]))}\n")
        wait = max(deadline - before, 0.0)
        ticks.append(
            f"sleep {wait:.10g} 3>&- &\n"
            # A sleep that knows no fractions rounds up; a deadline is not that exact.
            f"wait $! || {{ sleep {math.ceil(wait)} 3>&- & wait $!; }}\n"
            f"echo 't {number} 0' >&3\n"
        )
        before = deadline
    return (
        "".join(lists)
        # A TERM that comes right after a fork is lost where a trap for it was set before the fork.
        + "trap - TERM\n"
        + "{ _b_none=${!:-}; trap - EXIT PIPE\n"
        + 'trap \'[ "$!" = "$_b_none" ] || kill -9 "$!"; exit 0\' TERM HUP INT\n'
        + "".join(ticks)
        + "} </dev/null >/dev/null 2>&1 &\n_b_timer=$!\ntrap 'exit 143' TERM\n"
    )


def new_nonce() -> str:
    """A word that no output contains by chance or intent."""
    return secrets.token_hex(12)


def parse_outputs(
    probes: Sequence[Probe], answer_bytes: bytes, nonce: str
) -> dict[str, ProbeOutput]:
    """The framed answers by probe name. Raises ConnectionLost when the end mark is missing."""
    mark = f"\n@{nonce}:".encode()
    if mark + b"end\n" not in answer_bytes:
        raise _unfinished(answer_bytes, mark)
    outputs = {}
    for index, probe in enumerate(probes):
        frame = answer_bytes.partition(mark + f"out:{index}\n".encode())[2]
        out, _, rest = frame.partition(mark + f"err:{index}\n".encode())
        err, found, rest = rest.partition(mark + f"exit:{index}:".encode())
        state = rest.partition(b"\n")[0].decode("ascii", "replace")
        if not found or not (state == "timeout" or state.isdigit()):
            raise ProbeFailed(f"probe {probe.name} left no complete answer (exit {state!r})")
        timed_out = state == "timeout"
        code = 124 if timed_out else int(state)
        outputs[probe.name] = ProbeOutput(code, out, err, timed_out)
    return outputs


def _unfinished(answer_bytes: bytes, mark: bytes) -> errors.DeployError:
    failed = answer_bytes.partition(mark + b"fail:")[2].partition(b"\n")[0]
    if failed:
        return ProbeFailed(
            f"the target cannot be looked at: {failed.decode('utf-8', 'replace')}",
            fix="make one of these folders writable",
        )
    tail = answer_bytes[-400:].decode("utf-8", "replace").splitlines()
    return errors.ConnectionLost(
        "the answer to the probes ended before its end mark", evidence=tuple(tail[-5:])
    )


def parse_batch(probes: Sequence[Probe], answer_bytes: bytes, nonce: str) -> dict[type, object]:
    """Facts by their type. ProbeFailed names the probe whose parser raised."""
    facts: dict[type, object] = {}
    makers: dict[type, str] = {}
    outputs = parse_outputs(probes, answer_bytes, nonce)
    for probe in probes:
        try:
            fact = probe.parse(outputs[probe.name])
        except errors.DeployError:
            raise
        except Exception as error:
            shown = outputs[probe.name].text.splitlines()[:5]
            raise ProbeFailed(
                f"probe {probe.name}: its parser failed: {type(error).__name__}: {error}",
                fix="this is a bug of the tool; please report it with the lines shown",
                evidence=tuple(shown),
            ) from error
        if type(fact) in facts:
            raise ProbeFailed(
                f"probes {makers[type(fact)]} and {probe.name} both return "
                f"{type(fact).__name__}; a fact has one probe"
            )
        facts[type(fact)] = fact
        makers[type(fact)] = probe.name
    return facts


def prelude_output(answer_bytes: bytes, nonce: str) -> bytes:
    """What the prelude printed."""
    rest = answer_bytes.partition(f"\n@{nonce}:prelude\n".encode())[2]
    return rest.partition(f"\n@{nonce}:".encode())[0]


def gather(
    transport: Transport,
    probes: Sequence[Probe],
    *,
    prelude: str = "",
    on_prelude: Callable[[Answer, bytes], object] | None = None,
    nonce: str | None = None,
) -> dict[type, object]:
    """Runs all probes in one exec. `on_prelude` sees what the prelude printed, and may raise.

    When the prelude ended the script and `on_prelude` accepts it, the probes run in a second exec.
    Raises Unreachable and its subclasses, and ProbeFailed.
    """
    nonce = nonce or new_nonce()
    slowest = max((probe.timeout_s for probe in probes), default=0.0)
    answer = transport.run(batch_script(probes, nonce, prelude), timeout_s=slowest + 20.0)
    if on_prelude is not None:
        on_prelude(answer, prelude_output(answer.stdout, nonce))
        if answer.exit == 0 and f"\n@{nonce}:end\n".encode() not in answer.stdout:
            # The prelude ended the script, and its reader has settled that.
            script = batch_script(probes, nonce)
            answer = transport.run(script, timeout_s=slowest + 20.0)
    try:
        return parse_batch(probes, answer.stdout, nonce)
    except errors.DeployError as error:
        error.where = error.where or transport.name
        raise
