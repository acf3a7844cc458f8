"""The right to copy, as the source's sshd knows it: a line of authorized_keys, and its host keys.

The line stands where sshd itself says that it looks (`sshd -T`, which root may ask), else in
~/.ssh/authorized_keys; it is taken out of all of these places.
"""

from __future__ import annotations

import re

# The port is the one that our own connection came in by: a second sshd may have other keys.
HOST_KEYS = r"""PATH=$PATH:/usr/sbin:/usr/local/sbin
keys=$(
  cat /etc/ssh/ssh_host_*_key.pub 2>/dev/null
  sshd -T 2>/dev/null | awk '$1 == "hostkey" { print $2 }' |
    while IFS= read -r key; do cat "$key.pub" 2>/dev/null; done
)
case $keys in *?*) printf '%s\n' "$keys"; exit 0 ;; esac
set -- ${SSH_CONNECTION:-}
[ $# = 4 ] || exit 0
ssh-keyscan -T 5 -p "$4" "$3" 2>/dev/null | awk '{ print $2, $3 }'
exit 0
"""

# $1 tag that ends a line, $2 an address of who will log in (sshd may have rules for it); stdin:
# the new line, or nothing to only take the old ones out. What authorized_keys is a link to
# (Proxmox: a file of the cluster) is replaced, not the link.
AUTHORIZE = r"""umask 077
PATH=$PATH:/usr/sbin:/usr/local/sbin
tag=$1
line=$(cat)
user=$(id -un) || exit 1
number=$(id -u)
home=$(printf '%s' "$HOME" | sed 's/[\\&|]/\\&/g')
told=$(sshd -T -C "user=$user,host=$2,addr=$2" 2>/dev/null |
  awk '$1 == "authorizedkeysfile" { for (i = 2; i <= NF; i++) print $i }' |
  sed -e "s|%h|$home|g" -e "s|%u|$user|g" -e "s|%U|$number|g" -e 's|%%|%|g')
own=$HOME/.ssh/authorized_keys

put() {  # $1 the file, $2 a line to add
  file=$1
  [ ! -L "$file" ] || file=$(readlink -f "$file") || return 1
  [ -e "$file" ] || [ -n "$2" ] || return 0
  [ -n "$2" ] || grep -q -F -e " $tag" "$file" || return 0
  new=$file.deployer-new
  if { [ ! -e "$file" ] || awk -v tag="$tag" '$NF != tag' "$file"; } >"$new" &&
    { [ -z "$2" ] || printf '%s\n' "$2" >>"$new"; }; then
    if [ ! -s "$new" ] && [ "$file" = "$1" ]; then  # nobody else's line was there
      rm -f "$new" "$file"
      return
    fi
    [ ! -e "$file" ] || chown "$(stat -c %u:%g "$file")" "$new" 2>/dev/null
    [ ! -e "$file" ] || chmod "$(stat -c %a "$file")" "$new" 2>/dev/null
    mv -f "$new" "$file" && return 0
  fi
  rm -f "$new"
  return 1
}

chosen=
set -f
IFS='
'
for one in ${told:-$own}; do
  case $one in
    none) continue ;;
    /*) ;;
    *) one=$HOME/$one ;;
  esac
  # The user's own file before one that the machine's administrator keeps.
  case $one in "$HOME"/*) chosen=$one; break ;; esac
  chosen=${chosen:-$one}
done
if [ -n "$line" ]; then
  [ -n "$chosen" ] || { echo "sshd reads none (AuthorizedKeysFile none)" >&2; exit 1; }
  mkdir -p "${chosen%/*}" || exit 1
fi
for one in $told "$own"; do
  case $one in none) continue ;; /*) ;; *) one=$HOME/$one ;; esac
  [ "$one" = "$chosen" ] || put "$one" "" || exit 1
done
[ -z "$chosen" ] || put "$chosen" "$line"
"""


def key_line(public: str, command: str, addresses: list[str], tag: str) -> str:
    """The line of authorized_keys. Raises ValueError for what cannot stand in it."""
    kind, body, *_ = public.split()
    if not re.fullmatch(r"[a-z0-9@.-]+", kind) or not re.fullmatch(r"[A-Za-z0-9+/=]+", body):
        raise ValueError("no public key came")
    if '"' in command or "\n" in command:
        raise ValueError(f"no command of authorized_keys: {command!r}")
    allowed = ",".join(one for one in addresses if re.fullmatch(r"[0-9A-Fa-f.:]+", one))
    if not allowed:
        raise ValueError("the destination tells none of its addresses")
    return f'restrict,from="{allowed}",command="{command}" {kind} {body} {tag}'


def known_hosts(keys: str) -> str:
    """A known_hosts for one host alone, from its public host keys.

    Its name there is a pattern: whatever ssh calls the host, these are its keys.
    """
    rows = [line.split()[:2] for line in keys.splitlines() if len(line.split()) >= 2]
    lines = [f"* {kind} {body}\n" for kind, body in rows if kind.startswith(("ssh-", "ecdsa-"))]
    return "".join(dict.fromkeys(lines))
