#!/usr/bin/env python3
"""The strongest PyTorch that we know how to write: the steps of bench.py, rewritten by hand for speed, timed on one GPU.

    python3 peers/tuned hydra hydra-4 vision_bdh hrm hrm_lm hrm_lm-mamba2 polychromic generate polychromic-step lior lior-1 lior-64 diversity gpt2-124m qwen2.5-0.5b qwen2.5-1.5b-fp8 [--modes graphs,autotune] [--json out.json]
    python3 peers/tuned --check [hydra ..]   # every recipe against ../reference: TINY sizes, CPU, fp32 (losses, gradients, state, replies)
    TRITON_INTERPRET=1 python3 peers/tuned --check   # with the kernels of our own too; on a card: TUNED_DEVICE=cuda

"tuned" means: no autocast but a bf16 stream with f32 master weights, cast once a step; f32 norms, softmax and losses; matmuls that share an
input merged; cached RoPE; the loss head in chunks with its gradients made in the forward pass, only for rows with a target; gathers instead of
atomics; clipping inside fused AdamW; SDPA with cuDNN first; and what a recipe allows beside that (its function says so). What is computed stays the same.
compile: torch.compile.  graphs: the whole step (forward, backward, clip, AdamW) captured as ONE CUDA graph besides.  autotune: the same, max-autotune.
peak_gib counts what the capture allocates. Options are part of a mode (`graphs+CONV=cudnn`) or environment variables:
TUNED_CONV=matmul|cudnn  TUNED_EXTEND=1|0  TUNED_FIELD=sines|steps  TUNED_CHUNK=rows  TUNED_SDPA=cudnn|flash  TUNED_BLAS=cublas|cublaslt
TUNED_KERNELS=torch|own (choose.py: without it each kernel of our own is timed against PyTorch's way, and the faster taken; stderr has the times)
and for plain decoders those of plain.py, for hrm_lm those of reasoning.py.
"""
import time
STARTED = time.time()
import os, sys  # noqa: E402

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE, os.path.dirname(HERE)]
import torch  # noqa: E402
import serve  # noqa: E402
from common import S, option  # noqa: E402
import adapters, check, geometry, language, plain, puzzles, reasoning, vision, writing  # noqa: E402

# recipe -> the function that makes its pieces, and its arguments
RECIPES = {
    "hydra": (language.bench_hydra, {}), "hydra-4": (language.bench_hydra, {"batch": 4}), "vision_bdh": (vision.bench_vision, {}), "hrm": (puzzles.bench_hrm, {}),
    "hrm_lm": (reasoning.bench_hrm_lm, {}), "hrm_lm-mamba2": (reasoning.bench_hrm_lm, {"encoder": "mamba2", "experts": 0}),
    "polychromic": (adapters.bench_polychromic, {}), "generate": (writing.bench_generate, {}), "polychromic-step": (writing.bench_polychromic_step, {}),
    "lior": (geometry.bench_lior, {}), "lior-1": (geometry.bench_lior, {"batch": 1}), "lior-64": (geometry.bench_lior, {"batch": 64}),
    "diversity": (adapters.bench_diversity, {}),
    **{name: (plain.bench_decoder, {"name": name}) for name in plain.SIZES},
    "qwen2.5-1.5b-fp8": (plain.bench_decoder, {"name": "qwen2.5-1.5b", "fp8": "tensorwise"}),
}


def capture(piece):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        piece()
    return graph.replay


def build(recipe, mode):
    """The step as bare calls; what captures it."""
    S.mode = mode
    if option("BLAS", ""):
        torch.backends.cuda.preferred_blas_library(option("BLAS", ""))
    make, arguments = RECIPES[recipe]
    pieces, work, unit, *calls = make(**arguments)

    def repeated(pieces):
        def step():
            for piece, times in pieces:
                for _ in range(times):
                    piece()
        return step

    def finish():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                for piece, _ in pieces:
                    piece()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        return repeated([(capture(piece), times) for piece, times in pieces])
    return repeated(pieces), work, unit, calls[0] if calls else 1, finish if mode != "compile" else None


if __name__ == "__main__":
    from torch.nn.attention import SDPBackend, sdpa_kernel
    order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
    with sdpa_kernel(order if option("SDPA", "cudnn") == "cudnn" else order[1:], set_priority=True):
        serve.run(HERE, RECIPES, "graphs,autotune", build, STARTED, check=lambda: check.check([a for a in sys.argv[1:] if a in check.CHECKS]))
