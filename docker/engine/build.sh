#!/bin/sh
# The lab's engine wheels, built offline: sh build.sh OUTDIR
set -eu
out=${1:?usage: build.sh OUTDIR}
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
python=$(command -v python3)
"$python" "$here/wheel.py" "$here/torch" 2.11.0 "$out"
"$python" "$here/wheel.py" "$here/sglang" 0.5.11 "$out" torch==2.11.0
# The same code: the version decides about flags, log lines and arithmetic.
"$python" "$here/wheel.py" "$here/torch" 2.9.1 "$out"
"$python" "$here/wheel.py" "$here/sglang" 0.5.9 "$out" torch==2.9.1
"$python" "$here/wheel.py" "$here/torch" 2.14.1 "$out"
"$python" "$here/wheel.py" "$here/sglang" 0.5.23 "$out" torch==2.14.1
