"""Other systems on the workloads of this package, for readers who have the hardware: a script for each.

    python -m minfer_lib.bench.peers.vllm --shape qwen2.5-7b --batch 1 8 64 --json vllm.json
    python -m minfer_lib.bench.peers.nano_vllm --workload nano --source CHECKOUT
    python -m minfer_lib.bench.peers.llama_cpp --gguf MODEL.gguf --batch 1 8 32 --prompt-len 64 --output-len 64
    python -m minfer_lib.bench.peers.hf --shape qwen2.5-7b --batch 1 8

Each says how it set its system, which is installed apart. Figures that we recorded with them: `reported_rows`.
"""
