#!/bin/sh
# Install kilat, editable, with its development tools into the virtual environment $1, at the versions in constraints.txt.
set -eu
venv=$1
python=${PYTHON:-python3}

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "setup: $python is $("$python" -V 2>&1 | cut -d' ' -f2), kilat needs 3.11 or newer: make PYTHON=python3.12" >&2
    exit 1
}
if ! "$venv/bin/python" -c 'import pip' 2>/dev/null; then
    echo "setup: [1/3] virtual environment in $venv ($("$python" -V))"
    "$python" -m venv --clear "$venv" || {
        echo "setup: $python cannot make a virtual environment; on Debian and Ubuntu: apt install python3-venv" >&2
        exit 1
    }
fi
echo "setup: [2/3] packages at the versions in constraints.txt (torch is the large one; some minutes the first time)"
pip="$venv/bin/python -m pip --disable-pip-version-check"
# setuptools first and no isolated build, so that the build too uses the pinned version
$pip install -qq -c constraints.txt setuptools
$pip install -qq -c constraints.txt --no-build-isolation -e '.[dev,ray]'
echo "setup: [3/3] CPU kernels for this machine (built once, cached)"
"$venv/bin/python" -c 'from kilat.ops.cpu.kernels import available; print("setup:", available()[1])'
echo "setup: done, $("$venv/bin/python" -m pip list --format=freeze --disable-pip-version-check | wc -l) packages"
