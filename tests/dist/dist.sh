#!/usr/bin/env bash
# tests/dist/dist.sh PYTHON makes dist/: the sdist, and from it the CPU wheel, built as pip does, without torch. It checks their
# descriptions and contents, and runs operators from the wheel in a fresh environment, away from the sources.
set -euo pipefail
cd "$(dirname "$0")/../.."
export MAXRL_FAST_CUDA=OFF PIP_CONSTRAINT=$PWD/constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1
unset PYTHONPATH
tools=build/dist-tools
test -x $tools/bin/twine || { "$1" -m venv $tools; $tools/bin/pip install -q build twine; }
rm -rf dist build/fresh
$tools/bin/python -m build
$tools/bin/twine check --strict dist/*
$tools/bin/python tests/dist/check_dist.py dist
"$1" -m venv build/fresh
build/fresh/bin/pip install -q dist/*.whl
cp tests/dist/try_wheel.py build/fresh/
cd build/fresh
bin/python try_wheel.py
