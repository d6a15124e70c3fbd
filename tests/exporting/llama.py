"""llama.cpp, through llama-cpp-python's plain bindings: logits, greedy ids, tokens of a text."""

import ctypes
from pathlib import Path

import numpy as np
import torch

FLOAT32, OFF = 0, 0
"""The cache's type and flash attention: what is exact."""
ERROR = 4
"""The level of errors in llama.cpp's log."""
_LOGS: list[object] = []
"""Every function that llama.cpp was given, which it calls after the model is gone."""


class Llama:
    """A GGUF file, loaded; nothing but float32 on one thread."""

    def __init__(self, path: Path, context: int = 512):
        import llama_cpp

        self.api = llama_cpp
        self.said: list[str] = []
        self.log = llama_cpp.llama_log_callback(self._log)
        _LOGS.append(self.log)
        llama_cpp.llama_log_set(self.log, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        settings = llama_cpp.llama_model_default_params()
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), settings)
        if not self.model:
            raise ValueError(f"llama.cpp does not load {path}: {''.join(self.said)}")
        self.vocabulary = llama_cpp.llama_model_get_vocab(self.model)
        self.size = llama_cpp.llama_vocab_n_tokens(self.vocabulary)
        run = llama_cpp.llama_context_default_params()
        run.n_ctx = run.n_batch = run.n_ubatch = context
        run.n_threads = run.n_threads_batch = 1
        run.type_k = run.type_v = FLOAT32
        run.flash_attn_type = OFF
        self.context = llama_cpp.llama_init_from_model(self.model, run)

    def _log(self, level: int, text: bytes, data: object) -> None:
        if level == ERROR:
            self.said.append(text.decode(errors="replace"))

    def logits(self, ids: list[int]) -> torch.Tensor:
        """At every position of one sequence."""
        api = self.api
        api.llama_memory_clear(api.llama_get_memory(self.context), True)
        batch = api.llama_batch_init(len(ids), 0, 1)
        batch.n_tokens = len(ids)
        for place, token in enumerate(ids):
            batch.token[place], batch.pos[place] = int(token), place
            batch.n_seq_id[place], batch.seq_id[place][0], batch.logits[place] = 1, 0, 1
        failed = api.llama_decode(self.context, batch)
        assert not failed
        found = api.llama_get_logits(self.context)
        array = np.ctypeslib.as_array(found, (len(ids), self.size)).copy()
        api.llama_batch_free(batch)
        return torch.from_numpy(array)

    def greedy(self, ids: list[int], steps: int) -> list[int]:
        """The most probable next ids, one after the other."""
        written = list(ids)
        for _ in range(steps):
            written.append(int(self.logits(written)[-1].argmax()))
        return written[len(ids) :]

    def tokens(self, text: str) -> list[int]:
        """Ids of a text, with what is added to it and special tokens where they are written."""
        raw = text.encode()
        ids = (self.api.llama_token * (len(raw) + 8))()
        count = self.api.llama_tokenize(self.vocabulary, raw, len(raw), ids, len(ids), True, True)
        assert count >= 0
        return list(ids[:count])

    def close(self) -> None:
        self.api.llama_free(self.context)
        self.api.llama_model_free(self.model)
