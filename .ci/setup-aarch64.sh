#!/usr/bin/env bash
# Installs what the aarch64 steps of .ci/run need, beside rustup and without replacing any of it:
#   - the rustup toolchain "debian-web": Debian's rustc-web with the standard library for x86_64 and
#     aarch64 Linux and with the library sources, from which cargo builds core and alloc for bare metal;
#   - the aarch64 cross linker and C library, and qemu in user mode and system mode.
# Rustup's own downloads are not needed: everything comes from Debian packages. Needs Debian on x86_64
# and root. Running it again is free: it ends at once when what it would install works.
#
# Usage: setup-aarch64.sh [DIRECTORY]     (default: /opt/debian-web)
set -euo pipefail

readonly dir=${1:-/opt/debian-web}
readonly host=x86_64-unknown-linux-gnu
readonly toolchain=debian-web

fail() {
    echo "setup-aarch64: $*" >&2
    exit 1
}

# True when every part answers. The compilers are run, not just looked for: a half-copied toolchain has
# the files but does not start.
works() {
    local lib=$dir/lib/rustlib
    [ -e "$lib/src/rust/library/core/Cargo.toml" ] &&
        [ -e "$lib/$host/bin/rust-lld" ] &&
        compgen -G "$lib/$host/lib/libstd-*.rlib" >/dev/null &&
        compgen -G "$lib/aarch64-unknown-linux-gnu/lib/libstd-*.rlib" >/dev/null &&
        [ "$(rustc "+$toolchain" --print sysroot 2>/dev/null)" = "$(readlink -f "$dir")" ] &&
        cargo "+$toolchain" --version >/dev/null 2>&1 &&
        aarch64-linux-gnu-gcc --version >/dev/null 2>&1 &&
        [ -e /usr/aarch64-linux-gnu/lib/ld-linux-aarch64.so.1 ] &&
        qemu-aarch64-static --version >/dev/null 2>&1 &&
        qemu-system-aarch64 --version >/dev/null 2>&1
}

if works; then
    echo "setup-aarch64: $dir is ready ($(rustc "+$toolchain" --version))"
    exit 0
fi

[ "$(id -u)" = 0 ] || fail "installing packages needs root"
[ "$(uname -m)" = x86_64 ] || fail "the host is $(uname -m); only x86_64 is supported"
command -v apt-get >/dev/null || fail "no apt-get: this script knows Debian only"
command -v rustup >/dev/null || fail "no rustup: install it with the stable toolchain first"

export DEBIAN_FRONTEND=noninteractive
dpkg --print-foreign-architectures | grep -qx arm64 || dpkg --add-architecture arm64
apt-get update -qq
# The libraries after qemu are what rustc and LLVM load; their packages are unpacked below by hand and
# so bring no dependencies of their own.
apt-get install -y -qq --no-install-recommends \
    gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user-static qemu-system-arm \
    libedit2 libxml2 libz3-4 libffi8 libzstd1 zlib1g >/dev/null

# The packages that hold librustc_driver and LLVM carry a version in their names.
dependency() {
    apt-cache depends "$1" | sed -n "s/^ *Depends: \($2\)\$/\1/p" | head -n 1
}
driver=$(dependency libstd-rust-web-dev 'libstd-rust-web-[0-9].*')
[ -n "$driver" ] || fail "libstd-rust-web-dev names no libstd-rust-web-VERSION among its dependencies"
llvm=$(dependency "$driver" 'libllvm[0-9].*')
[ -n "$llvm" ] || fail "$driver names no libllvmVERSION among its dependencies"

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
cd "$scratch"
# The packages are unpacked, not installed: the arm64 one cannot be installed beside its amd64 twin, and
# a system-wide rustc would compete with rustup's. APT's unprivileged user cannot write to the scratch
# folder, hence the option.
apt-get download -qq -o APT::Sandbox::User=root \
    rustc-web "$driver" "$llvm" libstd-rust-web-dev libstd-rust-web-dev:arm64 rust-web-src
for package in *.deb; do
    dpkg-deb -x "$package" root
done

# Assembled in the scratch folder and moved into place last, so that an interrupted run leaves nothing
# that looks finished.
new=$scratch/new
mkdir -p "$new/bin" "$new/lib"
cp -a root/usr/bin/rustc root/usr/bin/rustdoc "$new/bin/"
cp -a root/usr/lib/x86_64-linux-gnu/librustc_driver* root/usr/lib/x86_64-linux-gnu/libLLVM* "$new/lib/"
cp -a root/usr/lib/rustlib "$new/lib/"
rm -rf "$new/lib/rustlib/src"
mkdir -p "$new/lib/rustlib/src/rust" "$new/lib/rustlib/$host/bin"
mv root/usr/src/rustc-*/library "$new/lib/rustlib/src/rust/"
# Debian's cargo wants an older libgit2, and its lld is packaged apart: rustup's own do for both.
sysroot=$(rustc +stable --print sysroot)
ln -s "$sysroot/bin/cargo" "$new/bin/cargo"
ln -s "$sysroot/lib/rustlib/$host/bin/rust-lld" "$new/lib/rustlib/$host/bin/rust-lld"

rm -rf "$dir"
mkdir -p "$(dirname "$dir")"
mv "$new" "$dir"
rustup toolchain link "$toolchain" "$(readlink -f "$dir")"
works || fail "$dir was installed but does not work; run 'rustc +$toolchain -vV' to see why"
echo "setup-aarch64: installed $(rustc "+$toolchain" --version) in $dir"
