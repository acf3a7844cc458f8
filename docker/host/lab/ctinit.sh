#!/bin/sh
# First process of a guest: $1 rootfs, $2 its /dev on the host, $3 host name, then triples of
# raw mount entries (source, target, options). Builds the mounts, changes the root, becomes init.
set -eu
root=$1 dev=$2 name=$3
shift 3
hostname "$name"
mount --bind "$root" "$root"
for sub in proc sys dev run tmp; do mkdir -p "$root/$sub"; done
mount -t proc proc "$root/proc"
mount --rbind /sys "$root/sys"
mount -t tmpfs -o mode=755,size=16m tmpfs "$root/dev"
cp -a "$dev/." "$root/dev/"
mount -t devpts -o newinstance,ptmxmode=0666,mode=620,gid=5 devpts "$root/dev/pts"
mount -t tmpfs -o mode=1777,size=256m tmpfs "$root/dev/shm"
mount -t tmpfs -o mode=755,size=64m tmpfs "$root/run"
# The same procfs answers of the driver as on the host.
for item in driver devices modules; do
    if [ -e "$root/proc/$item" ] && [ -e "/run/lab/proc/$item" ]; then
        mount --bind "/run/lab/proc/$item" "$root/proc/$item"
    fi
done
mount --bind /etc/resolv.conf "$root/etc/resolv.conf"
if grep -qx disk-full "$root/etc/lab/faults" 2>/dev/null; then
    mkdir -p "$root/srv/models"
    mount -t tmpfs -o size=8m tmpfs "$root/srv/models"
fi
while [ $# -ge 3 ]; do
    source=$1 target=$root/${2#/} options=$3
    shift 3
    case ,$options, in *,create=file,*) mkdir -p "${target%/*}"; [ -e "$target" ] || : >"$target" ;; esac
    case ,$options, in *,create=dir,*) mkdir -p "$target" ;; esac
    # What stays of a missing host node under `optional,create=file` is an empty file of mode 0000.
    if ! mount --bind "$source" "$target" 2>/dev/null; then
        case ,$options, in
        *,optional,*) [ -s "$target" ] || [ ! -f "$target" ] || chmod 0 "$target" ;;
        *) echo "lxc-start: failed to mount \"$source\" onto \"$target\"" >&2; exit 1 ;;
        esac
    fi
done
mkdir -p "$root/.old"
cd "$root"
pivot_root . .old
umount -l /.old
rmdir /.old
cd /
exec env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    container=lxc TERM=linux HOME=/root /usr/bin/python3 /usr/lib/lab/init.py </dev/null
