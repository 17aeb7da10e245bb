#!/usr/bin/env bash
# Runs the kernels' tests in an aarch64 Python under QEMU, on a machine of another architecture, without root:
#   tests/kernels/emulate_aarch64.sh [arguments of pytest]
# Needs cmake, an aarch64 cross compiler (CXX), qemu-user-static and mmdebstrap. SUITE is a release of Debian
# whose libraries are no older than the cross compiler's.
set -euo pipefail
cd "$(dirname "$0")/../.."
FOLDER=$PWD/build/aarch64
ROOT=$FOLDER/root SITE=$FOLDER/site
mkdir -p "$FOLDER"

if [ ! -e "$ROOT" ]; then
  mmdebstrap --quiet --variant=extract --architectures=arm64 --include=python3,libpython3-dev,libstdc++6 \
    "${SUITE:-bookworm}" "$ROOT"
fi
cat > "$FOLDER/python" <<END
#!/bin/sh
PYTHONPATH=$SITE exec ${QEMU:-qemu-aarch64-static} -L $ROOT $ROOT/usr/bin/python3 "\$@"
END
chmod +x "$FOLDER/python"
VERSION=$("$FOLDER/python" -c 'import sys; print(*sys.version_info[:2], sep=".")')
if [ ! -e "$SITE" ]; then
  "${PYTHON:-python3}" -m pip install --quiet --disable-pip-version-check --target "$SITE" --only-binary=:all: \
    --platform manylinux2014_aarch64 --platform manylinux_2_28_aarch64 --python-version "$VERSION" \
    gguf hypothesis nanobind numpy pytest pytest-timeout
fi

cmake -S . -B "$FOLDER/cmake" -DCMAKE_BUILD_TYPE=Release -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
  -DCMAKE_CXX_COMPILER="${CXX:-aarch64-linux-gnu-g++}" -DCMAKE_CXX_FLAGS="-idirafter $ROOT/usr/include" \
  -DPython_EXECUTABLE="$FOLDER/python" -DPython_INCLUDE_DIR="$ROOT/usr/include/python$VERSION"
cmake --build "$FOLDER/cmake" --parallel "${JOBS:-2}"
rm -rf "$SITE/pagoda"
cp -r src/pagoda "$SITE"
cmake --install "$FOLDER/cmake" --prefix "$SITE"

# An emulated step takes some fifty times as long as one that is not.
"$FOLDER/python" -m pytest --timeout 3600 "${@:-tests/kernels}"
