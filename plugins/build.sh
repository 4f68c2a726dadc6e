#!/usr/bin/env bash
# Builds a Rust guest into a component.
#
#   plugins/build.sh [GUEST_DIR] [OUT.wasm]
#
# Without arguments it rebuilds plugins/prebuilt/stripe-style.wasm. With a guest and no OUT the
# component stays in the guest's target folder, and its path is printed.
#
# A rustc that has the wasm32-unknown-unknown target is used as it is. Where there is none, and this
# is Debian, a compiler with its library source and a linker are unpacked from Debian's packages into
# a cache folder (nothing is installed), and the standard library is compiled for the guest.
#
# The bytes depend on the sources, the lock file and the compiler, never on where folders lie.
#
#   BOTIX_CACHE       where the unpacked toolchain lives; default <repository>/.cache
#   CARGO_TARGET_DIR  where builds go;                    default <repository>/target
set -euo pipefail
shopt -s inherit_errexit

readonly TARGET=wasm32-unknown-unknown
repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
readonly repo

say() { printf '%s\n' "$*" >&2; }
die() { say "build.sh: $*"; exit 1; }

# --- the compiler ---------------------------------------------------------------------------------

has_target() {
    local libs
    libs=$("${RUSTC:-rustc}" --print target-libdir --target "$TARGET" 2>/dev/null) || return 1
    compgen -G "$libs/libstd-*.rlib" >/dev/null
}

# The one package whose name matches a pattern among all that $1 pulls in.
dependency() {
    apt-cache depends --recurse --no-recommends --no-suggests --no-conflicts --no-breaks \
        --no-replaces --no-enhances "$1" | sed -nE "s/^($2)\$/\\1/p" | sort -u | tail -n 1
}

multiarch() { printf '%s-linux-gnu' "$(uname -m)"; }

candidate() { apt-cache policy "$1" | sed -n 's/^ *Candidate: //p'; }

# Fills the folder $1 with a compiler (bin/rustc) and a linker (bin/wasm-ld) that find their own
# libraries wherever the folder is moved to.
unpack_debian_toolchain() {
    local into=$1 version std llvm lld
    # Lists may be stale or absent; a failure shows when a package is not found.
    apt-get update -qq || say "build.sh: apt-get update failed, trying with the lists at hand"
    version=$(candidate rustc-web)
    [[ -n $version && $version != '(none)' ]] || die "this Debian has no package rustc-web"
    std=$(dependency "rustc-web=$version" 'libstd-rust-web-[0-9.]+')
    llvm=$(dependency "rustc-web=$version" 'libllvm[0-9]+')
    [[ -n $std && -n $llvm ]] || die "cannot tell which libraries rustc-web $version needs"
    lld=lld-${llvm#libllvm}

    mkdir "$into/deb" "$into/bin"
    (
        cd "$into/deb"
        apt-get download -qq "rustc-web=$version" "rust-web-src=$version" \
            "libstd-rust-web-dev=$version" "$std=$version" "$llvm" "$lld" 2>&1 |
            sed '/unsandboxed/d' >&2
    )
    local package
    for package in "$into"/deb/*.deb; do
        dpkg-deb -x "$package" "$into/root"
    done
    rm -r "$into/deb"

    local name path
    for name in rustc:usr/bin/rustc wasm-ld:usr/lib/llvm-"${llvm#libllvm}"/bin/wasm-ld; do
        path=$into/bin/${name%%:*}
        cat >"$path" <<WRAPPER
#!/bin/sh
here=\$(dirname "\$(readlink -f "\$0")")
LD_LIBRARY_PATH="\$here/../root/usr/lib/$(multiarch)" exec "\$here/../root/${name#*:}" "\$@"
WRAPPER
        chmod +x "$path"
    done
    "$into/bin/rustc" --version >&2 || die "the unpacked compiler does not run"
    "$into/bin/wasm-ld" --version >&2 || die "the unpacked linker does not run"
}

# Prints the folder of the unpacked toolchain, after making it if need be. It appears whole or not
# at all, and two builds at once make it once.
debian_toolchain() {
    local cache=${BOTIX_CACHE:-$repo/.cache} home unfinished
    mkdir -p "$cache"
    cache=$(cd "$cache" && pwd -P)
    home=$cache/guest-toolchain
    (
        flock 9
        [[ -x $home/bin/rustc ]] && exit 0
        { command -v apt-get && command -v dpkg-deb; } >/dev/null ||
            die "rustc has no $TARGET: run 'rustup target add $TARGET'"
        say "unpacking a guest toolchain into $home (once, about 1 GB)"
        unfinished=$(mktemp -d "$home.XXXXXX")
        trap 'rm -rf "$unfinished"' EXIT
        unpack_debian_toolchain "$unfinished"
        chmod 755 "$unfinished"
        mv -T "$unfinished" "$home"
    ) 9>"$home.lock"
    printf '%s' "$home"
}

# --- the build ------------------------------------------------------------------------------------

guest=${1:-$repo/plugins/stripe-style}
[[ -f $guest/Cargo.toml ]] || die "$guest holds no Cargo.toml"
guest=$(cd "$guest" && pwd -P)
name=$(basename "$guest")
targets=${CARGO_TARGET_DIR:-$repo/target}
mkdir -p "$targets"
targets=$(cd "$targets" && pwd -P)
build=$targets/guests/$name
if [[ $# -ge 2 ]]; then
    out=$2
elif [[ $# -eq 0 ]]; then
    out=$repo/plugins/prebuilt/$name.wasm
else
    out=$build/$name.wasm
fi
mkdir -p "$(dirname "$out")"
out=$(cd "$(dirname "$out")" && pwd -P)/$(basename "$out")

cargo_home=${CARGO_HOME:-$HOME/.cargo}
remap=("$guest=/guest" "$build=/target" "$cargo_home=/cargo")
settings=(CARGO_TARGET_DIR="$build" CARGO_INCREMENTAL=0)
arguments=(build --locked --release --target "$TARGET")
if ! has_target; then
    toolchain=$(debian_toolchain)
    settings+=(RUSTC="$toolchain/bin/rustc" RUSTC_BOOTSTRAP=1
        CARGO_TARGET_WASM32_UNKNOWN_UNKNOWN_LINKER="$toolchain/bin/wasm-ld")
    arguments+=(-Zbuild-std=std,panic_abort)
    remap+=("$toolchain/root=/toolchain")
fi

# Flags are parted by a byte that no path holds, so that a folder may have spaces in its name.
flags=
for pair in "${remap[@]}"; do
    flags+=${flags:+$'\x1f'}--remap-path-prefix=$pair
done

# What a former name of the crate left behind must not be taken for the guest.
rm -f "$build/$TARGET"/release/*.wasm
(cd "$guest" && env -u RUSTFLAGS -u CARGO_BUILD_TARGET "${settings[@]}" \
    CARGO_ENCODED_RUSTFLAGS="$flags" cargo "${arguments[@]}")
modules=("$build/$TARGET"/release/*.wasm)
[[ ${#modules[@]} -eq 1 && -f ${modules[0]} ]] || die "$guest must make one cdylib"

cargo run --quiet --locked --manifest-path "$repo/Cargo.toml" --target-dir "$targets" \
    --package componentize -- "${modules[0]}" -o "$out"

printf '%s  %s (%s bytes)\n' "$(sha256sum "$out" | cut -d' ' -f1)" "$out" "$(stat -c %s "$out")"
