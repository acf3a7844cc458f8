"""What lxc-attach does last, inside the guest: chdir /, exec, and its own texts for 126 and 127."""

import os
import sys

vmid, argv = sys.argv[1], sys.argv[2:]
os.chdir("/")
with open("/proc/self/environ", "rb") as file:
    if b"LC_CTYPE=" not in file.read():
        os.environ.pop("LC_CTYPE", None)  # Python's own, not the caller's
try:
    os.execvp(argv[0], argv)
except OSError as error:
    print(
        f"lxc-attach: {vmid}: ../src/lxc/attach.c: lxc_attach_run_command: 1848 "
        f'{error.strerror} - Failed to exec "{argv[0]}"',
        file=sys.stderr,
    )
    os._exit(127 if isinstance(error, FileNotFoundError) else 126)
