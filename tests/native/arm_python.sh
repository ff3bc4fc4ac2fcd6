#!/bin/sh
# Runs tests with Python, torch and fastlstm for Arm CPUs under qemu-aarch64: one with all extensions that
# the kernels use, one with dotprod (torch's packages do not run without). Everything lives in build/arm:
# Debian's Python of the version of .venv (unpacked, not installed), wheels, fastlstm compiled by
# g++-aarch64-linux-gnu.
# torch is older than in .venv: from 2.11 on its packages for Arm on PyPI need those of CUDA. It cannot compile a
# call of the kernels, and its profiler warns.
#
# usage: [CPUS="CPU..."] tests/native/arm_python.sh PYTEST-ARGUMENT...
set -eu
cd "$(dirname "$0")/../.."
arm=$PWD/build/arm
python=$(.venv/bin/python -c 'import sys; print("python%d.%d" % sys.version_info[:2])')
pip=".venv/bin/python -m pip --disable-pip-version-check"

# apt-get with lists and packages of its own, for arm64.
apt_arm() {
  apt-get -qq -o APT::Architecture=arm64 -o APT::Architectures::=arm64 -o "Dir::State=$arm/apt" \
    -o "Dir::State::status=$arm/apt/status" -o "Dir::Cache=$arm/apt" "$@"
}

install_arm() {
  $pip install --quiet --target "$arm/site" --upgrade --no-compile --only-binary=:all: --implementation cp \
    --python-version "${python#python}" --platform manylinux_2_28_aarch64 --platform manylinux_2_27_aarch64 \
    --platform manylinux2014_aarch64 "$@"
}

if [ ! -e "$arm/.made" ]; then
  rm -rf "$arm"
  mkdir -p "$arm/apt/lists/partial" "$arm/apt/archives/partial"
  touch "$arm/apt/status"
  apt_arm update
  apt_arm install --yes --no-install-recommends --download-only "$python" libstdc++6
  for package in "$arm"/apt/archives/*.deb; do dpkg -x "$package" "$arm/system"; done
  rm -r "$arm/apt"
  # pip asks this machine, not Arm's, which packages torch needs.
  install_arm --no-deps torch==2.10.0
  install_arm filelock typing-extensions sympy networkx jinja2 fsspec $(.venv/bin/python -c '
import tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
print(*(d for d in project["dependencies"] if not d.startswith("torch")))
print(*(d for d in project["optional-dependencies"]["dev"] if d.startswith(("pytest==", "hypothesis"))))')
  touch "$arm/.made"
fi

tag=$(.venv/bin/python -c 'import sys; print(sys.implementation.cache_tag)')
rm -rf "$arm/wheel"
CXX=aarch64-linux-gnu-g++ CMAKE_ARGS="-DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64" \
  _PYTHON_HOST_PLATFORM=linux-aarch64 SETUPTOOLS_EXT_SUFFIX=".$tag-aarch64-linux-gnu.so" \
  $pip wheel --quiet --no-deps --wheel-dir "$arm/wheel" .
rm -rf "$arm"/site/fastlstm*
.venv/bin/python -m zipfile -e "$arm"/wheel/*.whl "$arm/site"

# What tests start by sys.executable, too.
printf '#!/bin/sh\nexec qemu-aarch64 "%s" "$@"\n' "$arm/system/usr/bin/$python" >"$arm/python"
chmod +x "$arm/python"
echo "import sys; sys.executable = '$arm/python'" >"$arm/site/sitecustomize.py"

status=0
# With SVE torch comes to instructions that qemu 7 does not have.
for cpu in ${CPUS:-max,sve=off,pauth=off neoverse-n1}; do
  echo "$cpu:"
  QEMU_CPU=$cpu QEMU_LD_PREFIX=$arm/system PYTHONPATH=$arm/site OMP_NUM_THREADS=1 \
    "$arm/python" -m pytest -q -p no:cacheprovider -W ignore:Warning -k "not compiled" "$@" || status=1
done
exit $status
