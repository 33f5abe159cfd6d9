"""On a device what holds in Triton's interpreter."""

import pytest

pytest.importorskip("triton", reason="the kernels are Triton's")
from tests.support.emulated_fused import *  # noqa: F403
