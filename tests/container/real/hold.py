"""hold.py FILE SECONDS: holds a lock as apt and dpkg do."""

import fcntl
import sys
import time
from pathlib import Path

with Path(sys.argv[1]).open("a") as file:
    fcntl.lockf(file, fcntl.LOCK_EX)
    print("held", flush=True)
    time.sleep(float(sys.argv[2]))
