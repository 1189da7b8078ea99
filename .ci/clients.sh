#!/usr/bin/env bash
# Installs the clients of others that tests/integration/clients runs, NIXL and Mooncake, each in a place of its own below
# the folder that is the first argument. Prints the variables by which the tests find them.
set -euo pipefail
folder=$1
uv=$PWD/.venv/bin/uv
clients=tests/integration/clients
mkdir -p "$folder/node"
if command -v npm >/dev/null && cp "$clients/package.json" "$folder/node/" &&
  npm install --prefix "$folder/node" --no-audit --no-fund --silent >&2; then
  echo "NODE_CLIENTS=$folder/node"
fi
if "$uv" venv --quiet --python 3.11 "$folder/python" && "$uv" pip install --quiet --python "$folder/python/bin/python" -r "$clients/requirements.txt"; then
  echo "PYTHON_CLIENTS=$folder/python/bin/python"
fi
if "$uv" pip install --quiet --no-deps --python .venv/bin/python --target "$folder/nixl" nixl==1.5.1 nixl-cu13==1.5.1; then
  echo "NIXL_FOLDER=$folder/nixl"
fi
if "$uv" pip install --quiet --no-deps --python .venv/bin/python --target "$folder/mooncake" mooncake-transfer-engine-non-cuda==0.3.13.post1 &&
  PYTHONPATH="$folder/mooncake" .venv/bin/python -c "import mooncake.store" >&2; then
  echo "MOONCAKE_FOLDER=$folder/mooncake"
fi
for each in guidellm==0.8.1 aiperf==0.13.0 genai-bench==0.0.5; do
  "$uv" venv --quiet --python 3.11 "$folder/${each%%==*}" && "$uv" pip install --quiet --python "$folder/${each%%==*}/bin/python" "$each" || exit 0
done
echo "LOAD_GENERATORS=$folder"
