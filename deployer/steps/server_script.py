"""The script that looks at the server: our job, the owner of the port, venv, weights, libraries."""

from __future__ import annotations

from deployer.deployment import Deployment
from deployer.remote.job_marks import MARKED
from deployer.remote.jobs import ROOT
from deployer.shell import assignments
from deployer.steps.server_wanted import server_job_name

SCRIPT = (
    MARKED
    + r"""
put() { printf '%s=%s\n' "$1" "$2"; }
stat_of() {
  st_line=
  { IFS= read -r st_line <"/proc/$1/stat"; } 2>/dev/null
  [ -n "$st_line" ] || return 1
  set -- ${st_line##*) }
  st_state=$1 st_ppid=$2 st_session=$4 st_start=${20}
}
boot=
read -r boot </proc/sys/kernel/random/boot_id
put now_boot "$boot"
id=
if cd -P "$root/$name/current" 2>/dev/null; then id=${PWD##*/}; fi
cd /
session=
if [ -n "$id" ] && [ -d "$root/$name/$id" ]; then
  put job_id "$id"
  put job_name "$name"
  leader=
  { IFS= read -r leader <"$root/$name/$id/leader"; } 2>/dev/null
  for file in pid start boot session exit fingerprint launch verdict; do
    value=
    [ ! -f "$root/$name/$id/$file" ] || IFS= read -r value <"$root/$name/$id/$file"
    put "job_$file" "$value"
    case $file in
      session) session=$value ;;
      start) start=$value ;;
      boot) job_boot=$value ;;
      pid) pid=$value ;;
    esac
  done
  if [ "$job_boot" = "$boot" ]; then
    if [ -n "$pid" ] && stat_of "$pid"; then put job_stat "$st_start $st_state"; fi
    # Once its leader is gone, the session's number may have become another's.
    cgroup=any
    if ! stat_of "${session:-$pid}"; then
      cgroup=$(cat "$root/$name/$id/cgroup" 2>/dev/null)
    elif [ -n "$leader" ] && [ "$st_start" != "$leader" ]; then
      cgroup=
    fi
    for folder in /proc/[0-9]*; do
      if stat_of "${folder#/proc/}" && [ "$st_session" = "${session:-$pid}" ] \
        && [ "$st_start" -ge "${start:-0}" ] && [ -n "$cgroup" ]; then
        [ "$cgroup" = any ] || [ "$(cat "$folder/cgroup" 2>/dev/null)" = "$cgroup" ] || continue
        put member "${folder#/proc/} $st_start $st_state"
      fi
    done
  fi
fi
inodes=$(awk -v port="$port" 'BEGIN { p = sprintf(":%04X", port) }
  FNR > 1 && $4 == "0A" && substr($2, length($2) - 4) == p { printf "%s ", $10 }' \
  /proc/net/tcp /proc/net/tcp6 2>/dev/null)
for inode in $inodes; do put listen "$inode"; done
marked "$root" "$name" "$inodes" | while read -r pid id job; do
  stat_of "$pid" || continue
  if [ "$id" != - ]; then
    put marked "$pid $st_start $st_session $st_state $id"
    continue
  fi
  printf 'owner=%s ' "$pid $st_start $st_session $st_ppid $st_state $job"
  tr '\0\n' '  ' <"/proc/$pid/cmdline" 2>/dev/null | cut -c1-1000
  echo
done
[ ! -x "$venv/bin/python" ] || put venv yes
for info in "$venv"/lib/python3*/site-packages/sglang-*.dist-info; do
  [ ! -d "$info" ] || put engine "${info##*/}"
done
if [ -f "$model/config.json" ]; then
  printf 'config='
  head -c 262144 "$model/config.json" | tr '\n\r' '  '
  echo
fi
index=$model/model.safetensors.index.json
if [ -f "$index" ]; then
  if grep -q -E '"([^"]*\.)?mtp[._]|\.eh_proj\.|\.nextn[._]' "$index"; then
    put head yes
  else
    put head no
  fi
fi
put libc "$(getconf GNU_LIBC_VERSION 2>/dev/null)"
value=
{ read -r value </sys/module/nvidia/version; } 2>/dev/null && put driver "$value"
:
"""
)


def server_script_text(want: Deployment) -> str:
    """The probe's script with its values."""
    values = {
        "root": ROOT,
        "name": server_job_name(want),
        "port": str(want.port),
        "venv": want.playbook.engine.venv,
        "model": want.playbook.model.path,
    }
    return assignments(values) + SCRIPT
