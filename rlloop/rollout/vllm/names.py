"""Names under which vLLM finds rlloop's classes and formats. Imports nothing."""

ARCHITECTURE = "RlloopForCausalLM"
FORMAT = "rlloop"  # of configurations and of loading: any folder as rlloop's architecture
STOCK_FORMAT = "rlloop_stock"  # vLLM's model, with weights read by rlloop or lent by a trainer of its process
GATE = "rlloop.rollout.vllm.sampler:OnlyExact"  # a logits processor that refuses requests it must not serve
CPU_PLATFORM = "rlloop.rollout.vllm.platform.CpuPlatform"
CPU_WORKER = "rlloop.rollout.vllm.worker.CpuWorker"
RANK_EXECUTOR = "rlloop.rollout.vllm.executor.RankExecutor"
GPU_WORKER = "rlloop.rollout.vllm.gpu.GpuWorker"
