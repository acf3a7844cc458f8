#!/bin/sh
# In the build stage `kernel`: stand-in modules of two driver versions, the driver packages, the
# modules that the lab loads, the initrd, the client of pctd.py. Everything into /out.
set -eu
version=$(ls /kernel/lib/modules)
tree=/out/usr/lib/modules/$version
mkdir -p "$tree/updates/dkms" /out/boot /out/usr/lib/vmlab /out/var/lib/vz/template/cache

closure() { # MODULE...: their files and what they depend on, in load order
    for name in "$@"; do
        modprobe -d /kernel -S "$version" --show-depends "$name" | awk '$1 == "insmod" { print $2 }'
    done | awk '!seen[$0]++'
}

build() { # DRIVER_VERSION TARGET
    rm -rf /src/build
    cp -r /src/kernel /src/build
    make -s -C "/lib/modules/$version/build" M=/src/build "LAB_VERSION=$1" modules
    mkdir -p "$2"
    cp /src/build/nvidia.ko /src/build/nvidia-uvm.ko "$2/"
}

package() { # DRIVER_VERSION: the .run, with libraries that open the nodes
    rm -rf /src/package
    cp -r /src/driver /src/package
    sed -i "s/580\.126\.09/$1/g" /src/package/*
    # One file serves as all libraries: with a name in it, ldconfig would link that name to any.
    sed -i 's/,-soname,libcuda\.so\.1//' /src/package/make.sh
    sed -i 's/^REAL_DRIVER = False/REAL_DRIVER = True/' /src/package/nvidia-smi
    CC=gcc-12 CFLAGS=-DREAL_DRIVER OUT=/out/var/lib/vz/template/cache sh /src/package/make.sh lib
}

mkdir -p /out/usr/sbin
gcc-12 -static -s -Os -Wall -Wextra -Werror -o /out/usr/sbin/pct /src/pct.c

closure vfio-pci vfio_iommu_type1 virtio_net veth bridge | while read -r file; do
    install -D -m 644 "$file" "/out/usr${file#/kernel}"
done
build 575.57.08 /out/usr/lib/vmlab/575.57.08
build 580.126.09 "$tree/updates/dkms"
cp /src/build/gpuids.ko "$tree/updates/"
cp "/kernel/lib/modules/$version/modules.order" "/kernel/lib/modules/$version/modules.builtin" \
    "/kernel/lib/modules/$version/modules.builtin.modinfo" "$tree/"
ln -s usr/lib /out/lib
depmod -b /out "$version"
rm /out/lib
package 575.57.08
package 580.126.09

cp "/kernel/boot/vmlinuz-$version" /out/boot/vmlinuz
cd "$(mktemp -d)"
mkdir -p bin modules proc sys dev root
cp /bin/busybox bin/
cp /src/initrd.sh init
chmod 755 init
closure virtio_pci virtio_blk ext4 | while read -r file; do
    cp "$file" modules/
    echo "${file##*/}" >>modules/order
done
find . | cpio --quiet -o -H newc >/out/boot/initrd
