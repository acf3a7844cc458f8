#!/bin/busybox sh
# First process: mounts the disk, hands over to the host's init.
/bin/busybox mount -t proc proc /proc
/bin/busybox mount -t sysfs sysfs /sys
/bin/busybox mount -t devtmpfs devtmpfs /dev
for module in $(/bin/busybox cat /modules/order); do /bin/busybox insmod "/modules/$module"; done
tries=0
until [ -b /dev/vda ] || [ $tries = 200 ]; do /bin/busybox usleep 50000; tries=$((tries + 1)); done
/bin/busybox mount -t ext4 -o rw,noatime /dev/vda /root || exec /bin/busybox sh
for place in dev sys proc; do /bin/busybox mount --move /$place /root/$place; done
exec /bin/busybox switch_root /root /usr/lib/lab/init.sh
