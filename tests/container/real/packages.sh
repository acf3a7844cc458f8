#!/bin/sh
# packages.sh VERSION...: a local repository with packages as NVIDIA's, whose module is a few bytes of
# C that the real dkms builds; and what dkms takes for the headers of the running kernel.
set -eu
kernel=$(uname -r)
build=/lib/modules/$kernel/build
repo=/srv/repo
mkdir -p "$build/include" $repo
: >"$build/Makefile"
: >"$build/.config"
for file in modules.order modules.builtin modules.builtin.modinfo; do
    : >"/lib/modules/$kernel/$file"
done

package() { # NAME TREE DEPENDS
    mkdir -p "$2/DEBIAN"
    printf 'Package: %s\nVersion: %s-1\nArchitecture: amd64\nMaintainer: lab\n' "$1" "$version" \
        >"$2/DEBIAN/control"
    [ -z "$3" ] || printf 'Depends: %s\n' "$3" >>"$2/DEBIAN/control"
    echo 'Description: stand-in' >>"$2/DEBIAN/control"
    dpkg-deb --root-owner-group -b "$2" $repo >/dev/null
    rm -rf "$2"
}

for version in "$@"; do
    tree=$(mktemp -d)
    source=$tree/usr/src/nvidia-$version
    mkdir -p "$source" "$tree/DEBIAN"
    cat >"$source/nvidia.c" <<C
#define INFO(name, text) \\
    const char name[] __attribute__((section(".modinfo"), used)) = #name "=" text
INFO(version, "$version");
INFO(license, "Dual MIT/GPL");
C
    cat >"$source/dkms.conf" <<D
PACKAGE_NAME="nvidia"
PACKAGE_VERSION="$version"
BUILT_MODULE_NAME[0]="nvidia"
DEST_MODULE_LOCATION[0]="/updates/dkms"
MAKE[0]="gcc -c -o nvidia.ko nvidia.c"
CLEAN="rm -f nvidia.ko"
AUTOINSTALL="yes"
D
    printf '#!/bin/sh\nset -e\n[ "$1" = configure ] || exit 0\ndkms install nvidia/%s -k "$(uname -r)"\n' \
        "$version" >"$tree/DEBIAN/postinst"
    printf '#!/bin/sh\ndkms remove nvidia/%s --all || :\n' "$version" >"$tree/DEBIAN/prerm"
    chmod 755 "$tree/DEBIAN/postinst" "$tree/DEBIAN/prerm"
    package nvidia-kernel-dkms "$tree" dkms

    tree=$(mktemp -d)
    libraries=$tree/usr/lib/x86_64-linux-gnu
    mkdir -p "$libraries" "$tree/usr/bin"
    for name in libcuda libnvidia-ml; do
        echo "$name" >"$libraries/$name.so.$version"
        ln -s "$name.so.$version" "$libraries/$name.so.1"
    done
    printf '#!/bin/sh\nexit 9\n' >"$tree/usr/bin/nvidia-smi"
    chmod 755 "$tree/usr/bin/nvidia-smi"
    package nvidia-libs "$tree" ""

    tree=$(mktemp -d)
    package nvidia-driver "$tree" "nvidia-kernel-dkms (= $version-1), nvidia-libs (= $version-1)"
done
cd $repo
apt-ftparchive packages . >Packages
echo "deb [trusted=yes] file:$repo ./" >/etc/apt/sources.list
