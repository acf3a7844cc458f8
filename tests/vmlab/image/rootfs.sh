#!/bin/sh
# In the last build stage: puts the host's files in place.
set -eu
guest=/var/lib/lxc/129/rootfs
lab=/usr/lib/lab
mkdir -p $lab /etc/pve/lxc /etc/pve/qemu-server /etc/modprobe.d /etc/modules-load.d
# What the container lab's host has and what no kernel answers: pct and its configuration files, qm.
cp /tmp/stand-ins/lab/*.py $lab/
mv $lab/ct.py $lab/namespaces.py
rm -f $lab/host.py $lab/simulator.py $lab/pci.py $lab/ask.py $lab/ctmon.py
for name in qm pveversion update-initramfs proxmox-boot-tool; do
    install -m 755 /tmp/stand-ins/sbin/$name /usr/sbin/$name
done
# /usr/sbin/pct, from modules.sh, asks pctd.py, which answers as this program would.
install -m 755 /tmp/stand-ins/sbin/pct $lab/pct
cp /tmp/host/pctd.py $lab/pctd.py
cp /tmp/stand-ins/vfio.conf /etc/modprobe.d/vfio.conf
mkdir -p $guest$lab
cp /tmp/stand-ins/guest/*.py $guest$lab/
cp /tmp/host/ct.py $lab/ct.py
install -m 755 /tmp/host/init.sh $lab/init.sh
install -m 755 /tmp/host/nvidia-modprobe /usr/bin/nvidia-modprobe
install -m 755 /tmp/host/dkms /usr/sbin/dkms
install -m 640 /tmp/host/129.conf /etc/pve/lxc/129.conf
cp /tmp/host/sshd_config /etc/ssh/sshd_config
echo vfio-pci >/etc/modules
# The packages that Proxmox has and Debian has not.
for package in "pve-container 6.1.10" "pve-manager 9.2.11" "qemu-server 9.2.6"; do
    printf 'Package: %s\nStatus: install ok installed\nMaintainer: lab\nArchitecture: all\n' \
        "${package% *}" >>/var/lib/dpkg/status
    printf 'Version: %s\nDescription: stand-in\n\n' "${package#* }" >>/var/lib/dpkg/status
    : >"/var/lib/dpkg/info/${package% *}.list"
done
dpkg-query -W pve-container >/dev/null
# The driver's user space, on the host and in the guest.
package=NVIDIA-Linux-x86_64-580.126.09.run
sh /var/lib/vz/template/cache/$package --silent --no-kernel-modules >/dev/null
cp /var/lib/vz/template/cache/$package $guest/root/
chroot $guest sh /root/$package --silent --no-kernel-modules >/dev/null
rm $guest/root/$package
python3 -m compileall -q $lab
# Emulated, an import is dear: without the site module, and deaf to the environment.
sed -i '1s|^#!/usr/bin/python3$|#!/usr/bin/python3 -IS|' $lab/pct /usr/sbin/qm /usr/bin/nvidia-smi \
    $guest/usr/bin/nvidia-smi
mkdir -p /etc/lab $guest/etc/lab
for part in host guest; do
    root=
    [ $part = host ] || root=$guest
    mkdir -p "$root/root/.ssh" "$root/etc/ssh"
    install -m 600 /tmp/keys/$part "$root/etc/ssh/ssh_host_ed25519_key"
    install -m 644 /tmp/keys/$part.pub "$root/etc/ssh/ssh_host_ed25519_key.pub"
    install -m 600 /tmp/keys/user.pub "$root/root/.ssh/authorized_keys"
    chmod 700 "$root/root/.ssh"
    : >"$root/etc/lab/faults"
done
