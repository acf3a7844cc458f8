#!/bin/sh
# Makes the image debian:bookworm-slim where no registry answers: debootstrap, docker import.
# Needs root and debootstrap.
set -eu
export LC_ALL=C
image=${1:-debian:bookworm-slim}
[ "$(id -u)" = 0 ] || { echo "base: debootstrap needs root; or pull $image by hand" >&2; exit 1; }

# This machine's own mirror, when it is a Debian machine with one.
mirror=${DEBIAN_MIRROR:-}
for file in /etc/apt/sources.list /etc/apt/sources.list.d/debian.sources; do
    [ -z "$mirror" ] && [ -r "$file" ] || continue
    mirror=$(awk '$1 == "deb" || $1 == "URIs:" {
        for (i = 2; i <= NF; i++) if ($i ~ /^https?:/ && $i !~ /security|ubuntu/) { print $i; exit } }' "$file")
done
mirror=${mirror:-http://deb.debian.org/debian}

root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT INT TERM
echo "base: debootstrap bookworm from $mirror"
debootstrap --variant=minbase --include=ca-certificates bookworm "$root" "$mirror" >"$root.log" 2>&1 || {
    tail -n 5 "$root.log" >&2
    echo "base: debootstrap failed; whole log: $root.log" >&2
    exit 1
}
rm -rf "$root".log "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/* \
    "$root"/usr/share/doc/* "$root"/usr/share/man/* "$root"/usr/share/locale/*
tar -C "$root" -c . | docker import -c 'CMD ["bash"]' - "$image" >/dev/null
echo "base: $image is made"
