"""A stand-in of a running VM: holds the vfio group node $1 open until SIGTERM."""

import os
import signal
import sys

held = os.open(f"/dev/vfio/{sys.argv[1]}", os.O_RDWR)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
signal.pause()
