#!/bin/sh
# The lab's stand-in for NVIDIA-Linux-x86_64-580.126.09.run: the options of the real installer that
# a deployer uses. Installs nvidia-smi and libraries; --uninstall removes them.
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

main() {
    silent= modules=yes action=install
    for word in "$@"; do
        case $word in
        -s | --silent | --ui=none | -q | --no-questions) silent=yes ;;
        --no-kernel-module | --no-kernel-modules) modules= ;;
        --uninstall) action=uninstall ;;
        -v | --version) action=version ;;
        -i | --driver-info) action=info ;;
        --check) action=check ;;
        --dkms | -M=* | --kernel-module-type=* | --no-nouveau-check | --no-x-check | --no-backup) ;;
        --no-rebuild-initramfs | --no-nvidia-modprobe | --no-opengl-files | --skip-module-load) ;;
        --allow-installation-with-running-driver | --no-install-compat32-libs | --no-systemd) ;;
        --no-drm | --no-check-for-alternate-installs | -a | --accept-license | --tmpdir=*) ;;
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
    [ -z "$modules" ] || fail "this stand-in builds no kernel modules: use --no-kernel-modules"
    echo "Verifying archive integrity... OK"
    echo "Uncompressing NVIDIA Accelerated Graphics Driver for Linux-x86_64 $version"
    install_files
    echo "Installation of the NVIDIA Accelerated Graphics Driver for Linux-x86_64 (version: $version) is now complete." >>"$log"
}

