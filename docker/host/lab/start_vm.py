"""Starts the stand-in of VM $1 that holds vfio group $2, and returns once it holds it."""

import os
import subprocess
import sys
import time

vmid, group = sys.argv[1], sys.argv[2]
held = subprocess.Popen(
    [
        "/usr/bin/kvm",
        "/usr/lib/lab/vm.py",
        group,
        "-id",
        vmid,
        "-name",
        "windows",
        "-device",
        "vfio-pci,host=0000:21:00.0",
    ],
    executable="/usr/bin/python3",
    start_new_session=True,
    stdin=subprocess.DEVNULL,
    stdout=subprocess.DEVNULL,
    stderr=subprocess.DEVNULL,
    cwd="/",
)
deadline = time.monotonic() + 5
while not any(
    os.path.realpath(f"/proc/{held.pid}/fd/{fd}") == f"/dev/vfio/{group}"
    for fd in os.listdir(f"/proc/{held.pid}/fd")
):
    if held.poll() is not None or time.monotonic() > deadline:
        sys.exit(f"fault: /dev/vfio/{group} cannot be held: is the GPU still on vfio-pci?")
    time.sleep(0.02)
with open(f"/run/qemu-server/{vmid}.pid", "w") as file:
    file.write(f"{held.pid}\n")
