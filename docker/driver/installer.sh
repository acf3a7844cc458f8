#!/bin/sh
# The lab's stand-in for NVIDIA-Linux-x86_64-580.126.09.run: the options of the real installer that
# a deployer uses. Installs nvidia-smi, libraries and, without --no-kernel-modules, modules for the
# running kernel, with the refusals of the real one; --uninstall removes them. /etc/lab/build-seconds:
# how long the build takes, or until that file is gone.
version=580.126.09
libs=/usr/lib/x86_64-linux-gnu
log=/var/log/nvidia-installer.log

fail() { echo "ERROR: $1" >&2; echo "ERROR: $1" >>"$log"; exit 1; }

install_files() {
    mkdir -p "$libs" || fail "cannot make $libs"
    for name in libcuda libnvidia-ml libnvidia-ptxjitcompiler; do
        payload_lib >"$libs/$name.so.$version.new" || fail "cannot write to $libs"
        chmod 755 "$libs/$name.so.$version.new"
        mv "$libs/$name.so.$version.new" "$libs/$name.so.$version"
        ln -sfn "$name.so.$version" "$libs/$name.so.1"
        ln -sfn "$name.so.1" "$libs/$name.so"
    done
    payload_smi >/usr/bin/nvidia-smi.new || fail "cannot write to /usr/bin"
    chmod 755 /usr/bin/nvidia-smi.new
    mv /usr/bin/nvidia-smi.new /usr/bin/nvidia-smi
    ldconfig
}

build_modules() {
    kernel=$(uname -r)
    if [ -d /sys/module/nouveau ]; then
        fail "The Nouveau kernel driver is currently in use by your system.  This driver is incompatible with the NVIDIA driver, and must be disabled before proceeding."
    fi
    if [ -d /sys/module/nvidia ]; then
        fail "An NVIDIA kernel module 'nvidia' appears to already be loaded in your kernel.  This may be because it is in use (for example, by an X server, a CUDA program, or the NVIDIA Persistence Daemon)."
    fi
    if [ ! -e "/lib/modules/$kernel/build/Makefile" ]; then
        fail "Unable to find the kernel source tree for the currently running kernel.  Please make sure you have installed the kernel source files for your kernel."
    fi
    echo "-> Kernel module type: $kind; dkms: ${dkms:-no}" >>"$log"
    seconds=$(cat /etc/lab/build-seconds 2>/dev/null) || seconds=0
    while [ "$seconds" -gt 0 ] && [ -e /etc/lab/build-seconds ]; do
        echo "  CC [M]  nvidia/nv-$seconds.o" >>"$log"
        sleep 1
        seconds=$((seconds - 1))
    done
    folder=/lib/modules/$kernel/updates/dkms
    mkdir -p "$folder" "/usr/src/nvidia-$version" || fail "cannot write to $folder"
    for name in nvidia nvidia-uvm nvidia-modeset nvidia-drm; do
        echo "$version" >"$folder/$name.ko"
    done
    [ -z "$load" ] || modprobe nvidia || fail "Unable to load the kernel module 'nvidia.ko'."
}

main() {
    silent= modules=yes action=install dkms= kind=open load=yes tmpdir=${TMPDIR:-/tmp}
    for word in "$@"; do
        case $word in
        -s | --silent | --ui=none | -q | --no-questions) silent=yes ;;
        --no-kernel-module | --no-kernel-modules) modules= ;;
        --uninstall) action=uninstall ;;
        -v | --version) action=version ;;
        -i | --driver-info) action=info ;;
        --check) action=check ;;
        --dkms) dkms=yes ;;
        -M=open | --kernel-module-type=open) kind=open ;;
        -M=proprietary | --kernel-module-type=proprietary) kind=proprietary ;;
        --skip-module-load) load= ;;
        --tmpdir=*) tmpdir=${word#*=} ;;
        --no-nouveau-check | --no-x-check | --no-backup) ;;
        --no-rebuild-initramfs | --no-nvidia-modprobe | --no-opengl-files) ;;
        --allow-installation-with-running-driver | --no-install-compat32-libs | --no-systemd) ;;
        --no-drm | --no-check-for-alternate-installs | -a | --accept-license) ;;
        --no-install-libglvnd | --no-distro-scripts | --no-wine-files | --no-dkms) ;;
        *) echo "nvidia-installer: unrecognized option '$word'" >&2; exit 1 ;;
        esac
    done
    case $action in
    version) echo "nvidia-installer:  version $version"; exit 0 ;;
    check) echo "Verifying archive integrity... OK"; exit 0 ;;
    esac
    [ "$(id -u)" = 0 ] || { echo "ERROR: nvidia-installer must be run as root" >&2; exit 1; }
    mkdir -p "${log%/*}"
    echo "nvidia-installer log file '$log'; creation time: $(date)" >"$log"
    case $action in
    info)
        if [ -e "$libs/libcuda.so.$version" ]; then
            echo "The currently installed driver is: 'NVIDIA Accelerated Graphics Driver for Linux-x86_64' (version: $version)."
            exit 0
        fi
        echo "There is no NVIDIA driver currently installed." ; exit 1 ;;
    uninstall)
        rm -f /usr/bin/nvidia-smi "$libs"/libcuda.so* "$libs"/libnvidia-ml.so* \
            "$libs"/libnvidia-ptxjitcompiler.so*
        ldconfig
        exit 0 ;;
    esac
    [ -n "$silent" ] || fail "this stand-in has no questions to ask: use --silent"
    [ -w "$tmpdir" ] || fail "cannot write to the temporary directory $tmpdir"
    echo "Verifying archive integrity... OK"
    echo "Uncompressing NVIDIA Accelerated Graphics Driver for Linux-x86_64 $version"
    [ -z "$modules" ] || build_modules
    install_files
    echo "Installation of the NVIDIA Accelerated Graphics Driver for Linux-x86_64 (version: $version) is now complete." >>"$log"
}

