#!/bin/sh
# A machine to boot: a kernel without modules, a disk that only grub-probe knows of, and GPUs that
# modprobe.d, both loaders' command lines and the early modules give to vfio-pci.
set -eu
kernel=6.8.12-1-pve
mkdir -p /lib/modules/$kernel /boot/grub /etc/default/grub.d /boot/loader/entries
: >/lib/modules/$kernel/modules.order
: >/lib/modules/$kernel/modules.builtin
: >/lib/modules/$kernel/modules.builtin.modinfo
depmod $kernel
echo kernel >/boot/vmlinuz-$kernel
printf 'CONFIG_RD_GZIP=y\nCONFIG_RD_ZSTD=y\n' >/boot/config-$kernel
echo MODULES=list >/etc/initramfs-tools/conf.d/lab
cat >/usr/sbin/grub-probe <<'P'
#!/bin/sh
# Stand-in: there is no disk here.
case "$*" in
*device*) echo /dev/vda1 ;;
*fs_uuid*) echo 1b0c53b4-0000-4000-8000-000000000001 ;;
*target=fs*) echo ext2 ;;
*abstraction* | *partmap*) ;;
*) echo hd0 ;;
esac
P
cat >/etc/default/grub <<'G'
GRUB_DEFAULT=0
GRUB_TIMEOUT=5
GRUB_DISTRIBUTOR="Proxmox VE"
GRUB_CMDLINE_LINUX_DEFAULT="quiet vfio-pci.ids=10de:2230,10de:1aef iommu=pt"
G
echo 'GRUB_CMDLINE_LINUX="$GRUB_CMDLINE_LINUX vfio-pci.ids=10de:2230"' >/etc/default/grub.d/gpu.cfg
printf '# GPUs of the VM\noptions vfio-pci ids=10de:2230,10de:1aef disable_vga=1\n' \
    >/etc/modprobe.d/vfio.conf
echo 'blacklist nvidia' >/etc/modprobe.d/blacklist.conf
echo 'root=ZFS=rpool/ROOT/pve-1 vfio-pci.ids=10de:2230 quiet' >/etc/kernel/cmdline
update-initramfs -c -k $kernel
update-grub
