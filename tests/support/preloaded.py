"""What the processes of `tests.support.command` have in common: modules of torch and of runs. Nothing is started."""

import hydra  # noqa: F401
import matplotlib.figure  # noqa: F401
import torch._dynamo  # noqa: F401 (an optimizer imports it)

import rlloop.api.server
import rlloop.cli.main
import rlloop.launch.compose
import rlloop.launch.run
import rlloop.numerics.kernels.cpu.backend
import rlloop.rollout.fleet.engine_server
import rlloop.runs.plots  # noqa: F401
