#!/bin/sh
# Pid 1 of the VM lab's host: what systemd and Proxmox do at boot, as far as GPUs and guests go.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root
mount -t tmpfs -o mode=755 tmpfs /run
mount -t tmpfs -o mode=1777 tmpfs /tmp
mkdir -p /dev/pts /dev/shm /run/sshd /run/lock/lxc /run/lab /run/qemu-server
mount -t devpts -o gid=5,mode=620,ptmxmode=666 devpts /dev/pts
mount -t tmpfs tmpfs /dev/shm
mount -t cgroup2 cgroup2 /sys/fs/cgroup
hostname kpro5
modprobe -a virtio_net bridge veth gpuids

# systemd-modules-load, then udev's coldplug (of the GPUs only).
cat /etc/modules /etc/modules-load.d/*.conf 2>/dev/null | sed -e 's/[#;].*//' -e '/^ *$/d' |
    while read -r module; do modprobe "$module"; done
for device in /sys/bus/pci/devices/*; do
    if [ "$(cat "$device/vendor")" = 0x10de ] && [ ! -e "$device/driver" ]; then
        modprobe -b "$(cat "$device/modalias")" 2>/dev/null
    fi
done

ip link set lo up
for net in /sys/class/net/*; do
    case $(readlink "$net/device/driver") in */virtio_net) nic=${net##*/} ;; esac
done
ip link add vmbr0 type bridge
ip link set "$nic" master vmbr0 up
ip link set vmbr0 up
ip addr add 10.0.2.15/24 dev vmbr0
ip route add default via 10.0.2.2
# With the locale that Python would put into its environment by itself.
LC_CTYPE=C.UTF-8 python3 -IS /usr/lib/lab/pctd.py </dev/null >/var/log/pctd.log 2>&1 &
/usr/sbin/sshd

# Enabled units that come before the guests, then guests with onboot: 1 (pve-guests.service).
for unit in /etc/systemd/system/multi-user.target.wants/*.service; do
    [ -e "$unit" ] && grep -q '^Before=.*pve-guests' "$unit" || continue
    sed -n 's/^ExecStart=-\{0,1\}//p' "$unit" | while read -r line; do
        eval "$line" </dev/null >>/var/log/units.log 2>&1
        echo "$unit: exit $?" >>/var/log/units.log
    done
done
for conf in /etc/pve/lxc/*.conf; do
    vmid=${conf##*/}
    if sed '/^\[/q' "$conf" | grep -q '^onboot: *1'; then
        pct start "${vmid%.conf}" >>/var/log/units.log 2>&1
    fi
done
: >/run/lab/booted
: >/etc/inittab
exec busybox init
