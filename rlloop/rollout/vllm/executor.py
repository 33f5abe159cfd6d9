"""vLLM's executor in a process that is one of a run's ranks."""

from __future__ import annotations

import torch
from vllm.v1.executor.uniproc_executor import UniProcExecutor


class RankExecutor(UniProcExecutor):
    """Runs vLLM's worker in this process, as this rank of the run's process group and on its GPU.

    Ranks of an engine each have a scheduler. They get the same requests in the same order and none of their decisions
    depends on time, so they take the same steps. vLLM's own executor of this kind, `external_launcher`, reads its rank
    from torchrun's variables, which Ray's actors do not have.
    """

    def _distributed_args(self) -> tuple[str, int, int]:
        """(how ranks would meet if they had not, rank, index of the GPU)."""
        method, _, _ = super()._distributed_args()
        index = torch.cuda.current_device() if torch.cuda.is_available() else 0
        return method, torch.distributed.get_rank(), index
