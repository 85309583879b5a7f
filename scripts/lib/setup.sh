# Sourced by the other scripts: makes .venv if it is absent, installs the package into it once, and puts it first in PATH.
# Leaves ROOT (the repository) set. Installs again only when what decides the environment has changed.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
VENV="$ROOT/.venv"

die() {
    echo "shardwright: $*" >&2
    exit 1
}

# Prints the first interpreter that is new enough, or ends with the line that says what to install.
find_python() {
    local candidate
    for candidate in python3 python3.13 python3.12 python3.11 python; do
        if command -v "$candidate" >/dev/null 2>&1 &&
            "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
            command -v "$candidate"
            return
        fi
    done
    if command -v python3 >/dev/null 2>&1; then
        die "python3 is $(python3 --version 2>&1 | cut -d' ' -f2), but Python 3.11 or newer is needed; install it so that python3 or python3.11 is in PATH"
    fi
    die "python3 is not in PATH; install Python 3.11 or newer"
}

# A hash of everything that decides what .venv holds, its own place included because a venv cannot be moved.
environment_key() {
    cat setup.py constraints.txt shardwright/_version.py <(echo "$VENV") | cksum
}

make_venv() {
    local python
    python="$(find_python)" || exit 1
    "$python" -c 'import ensurepip, venv' >/dev/null 2>&1 ||
        die "$python has no venv module; install it (Debian and Ubuntu: apt-get install python3-venv) and run this again"
    rm -rf "$VENV"
    "$python" -m venv "$VENV" || die "could not make $VENV with $python; see the message above"
}

install_package() {
    local log="$VENV/install.log"
    echo "Installing Shardwright and its dependencies into .venv (once, a minute or two) ..."
    if ! "$VENV/bin/python" -m pip install --disable-pip-version-check -c constraints.txt -e '.[test]' >"$log" 2>&1; then
        tail -n 15 "$log" >&2
        die "the installation failed; the whole log is in $log"
    fi
    environment_key >"$VENV/.installed"
}

# install_extra EXTRA MODULE: an extra of setup.py on top of what is there, unless its module can be found.
install_extra() {
    "$VENV/bin/python" -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('$2') is None)" && return
    echo "Installing the extra '$1' into .venv (once) ..."
    "$VENV/bin/python" -m pip install --disable-pip-version-check -q -c constraints.txt -e ".[$1]" ||
        die "the installation of the extra '$1' failed; see the message above"
}

cd "$ROOT" || exit 1
"$VENV/bin/python" -c '' >/dev/null 2>&1 || make_venv || exit 1
[ "$(cat "$VENV/.installed" 2>/dev/null)" = "$(environment_key)" ] || install_package
export PATH="$VENV/bin:$PATH"
