#!/bin/sh
# Makes the stand-in installer from its parts. Deterministic, so the playbook can name its sha256.
# Needs gcc only to rebuild libcuda.so.b64 (`sh make.sh lib`); that file is kept in git. The VM lab
# makes its own with CFLAGS=-DREAL_DRIVER.
set -eu
cd "$(dirname "$0")"
run=NVIDIA-Linux-x86_64-580.126.09.run
if [ "${1:-}" = lib ]; then
    temp=$(mktemp -d)
    trap 'rm -rf "$temp"' EXIT
    # shellcheck disable=SC2086 # a list of options
    ${CC:-gcc} ${CFLAGS:-} -Os -shared -fPIC -nostdlib -ffreestanding -fno-stack-protector -fno-asynchronous-unwind-tables \
        -Wl,-s,-z,noseparate-code,--hash-style=gnu,--build-id=none,-soname,libcuda.so.1 \
        -o "$temp/lib.so" libcuda.c
    base64 -w 100 "$temp/lib.so" >libcuda.so.b64
fi
out=${OUT:-.}/$run
{
    cat installer.sh
    echo 'payload_smi() { cat <<'\''END_OF_SMI'\'''
    cat nvidia-smi
    echo 'END_OF_SMI'
    echo '}'
    echo 'payload_lib() { base64 -d <<'\''END_OF_LIB'\'''
    cat libcuda.so.b64
    echo 'END_OF_LIB'
    echo '}'
    echo 'main "$@"'
} >"$out.new"
chmod 755 "$out.new"
mv "$out.new" "$out"
sha256sum "$out"
