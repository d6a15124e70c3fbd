"""What llama.cpp computes from our files is what transformers computes from the checkpoints.

`make gguf` builds llama-cpp-python and runs these.
"""

import ctypes

import pytest
import torch
from llama import Llama
from transformers import AutoTokenizer
from variants import HELD, UNIT, YARN

import bpe_tokenizers as bt
import coec
import tiny_models as tm
from coec.models.dense import Dense
from coec.text.windows import windows_in_order

pytestmark = pytest.mark.llama_cpp

TOLERANCE = 2e-4
"""Of logits of magnitude 5 to 20, which llama.cpp computes in float32."""
LENGTH, STEPS = 60, 20
WINDOW = 8
SETTINGS = {"preset": "paper", "sparsity": 0.3, "samples": 24, "seq_len": 32}
LLAMA_3 = tm.VARIANTS["llama rope"]["rope_scaling"]
MODELS = {variant: (variant, {}) for variant in HELD} | {
    "linear": ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    "yarn": ("llama", {"rope_scaling": YARN, "head_dim": 16}),
    "yarn of a large base": ("mistral", {"rope_scaling": YARN, "rope_theta": 1e6, "head_dim": 16}),
    "qwen3 linear": ("qwen3", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    "qwen3 yarn": ("qwen3", {"rope_scaling": YARN, "rope_theta": 1e6, "head_dim": 16}),
    "qwen2 tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2 wide heads": ("qwen2", {"head_dim": 6}),
    "granite of neutral multipliers": ("granite", UNIT),
    "granite biases": ("granite", {"attention_bias": True, "mlp_bias": True}),
    "granite wide heads": ("granite", {"head_dim": 6, "rope_scaling": LLAMA_3}),
    "seed_oss biases": ("seed_oss", {"attention_out_bias": True, "mlp_bias": True}),
}
"""Variants, and what else a target may have to compute."""
TEXTS = [
    "Hello world, it's 12345 and I'LL go  now   !\n\n  x",
    "naïve café Straße 日本語テスト русский ΑΒγδ 🙂🙂 “quotes”…—",
    "a\r\n\r\nb\t\tc \n \n d", "1 22 333 4444 ١٢٣ Ⅳ ½ don't DON'T 'tis camelCaseHTTPServer",
    "<s>the</s> <tool> th<tool>he", "   ", "\n\n\n", " leading", "trailing ", "",
]  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def _built():
    why = "needs llama-cpp-python, which `make gguf` builds"
    pytest.importorskip("llama_cpp", reason=why, exc_type=ImportError)


def random_ids(vocabulary, length):
    generator = torch.Generator().manual_seed(3)
    return torch.randint(2, vocabulary, (1, length), generator=generator)


def network_of(folder):
    return Dense.open(folder).network(torch.device("cpu"), torch.float64)


@torch.no_grad()
def difference(file, folder):
    """Of the logits on some ids, relative."""
    ids = list(range(2, 50))
    found = Llama(file).logits(ids).double()
    expected = network_of(folder)(input_ids=torch.tensor([ids])).logits[0]
    return (found - expected).norm() / expected.norm()


@torch.no_grad()
def compare(folder, out, ids, start, context=None, room=512):
    """Writes the file; logits and greedy ids behind `start` ids by both programs, equal."""
    coec.export(folder, out, no_tokenizer=True, context=context)
    network, llama = network_of(folder), Llama(out, context=room)
    expected = network(input_ids=ids, use_cache=False).logits[0]
    torch.testing.assert_close(
        llama.logits(ids[0].tolist()).double(), expected, rtol=0, atol=TOLERANCE
    )
    steps, begin = min(STEPS, ids.shape[1] - start), ids[:, :start]
    greedy = network.generate(begin, max_new_tokens=steps, do_sample=False, eos_token_id=None)
    assert llama.greedy(begin[0].tolist(), steps) == greedy[0, start:].tolist()
    llama.close()


def compare_tiny(folder, out, context=None):
    ids = random_ids(tm.VOCABULARY, context or LENGTH)
    compare(folder, out, ids, 4, context, room=tm.POSITIONS)


@pytest.mark.parametrize("name", MODELS)
def test_dense_and_pruned_models_compute_the_same(name, tokens, tmp_path):
    variant, changes = MODELS[name]
    dense = tm.save(tm.tiny(variant, torch.float32, **changes), tmp_path / "dense")
    window = WINDOW if variant in ("mistral sliding", "qwen2 mixed") else None
    compare_tiny(dense, tmp_path / "dense.gguf", window)
    for compensation in ("none", "bias"):
        out = tmp_path / compensation
        try:
            coec.prune(dense, out, calibration=tokens, compensation=compensation, **SETTINGS)
        except coec.CoecError:
            assert compensation == "bias"  # no stock format has one: the contract tests say which
            continue
        compare_tiny(out, tmp_path / f"{compensation}.gguf", window)


OWN_WIDTHS = {
    "layers.0.mlp": [0, 3, 4, 9], "layers.1.mlp": list(range(2, 40, 2)),
    "layers.0.attention": [0, 2, 3], "layers.1.attention": [1],
}  # fmt: skip


@pytest.mark.parametrize("compensation", ["none", "bias"])
@pytest.mark.parametrize(
    "variant", ["llama", "llama tied", "llama biases", "llama rope", "mistral", "qwen2", "seed_oss"]
)
def test_widths_by_block_compute_the_same(variant, compensation, tokens, tmp_path):
    dense = tm.save(tm.tiny(variant, torch.float32), tmp_path / "dense")
    coec.prune(
        dense, tmp_path / "out", calibration=tokens, compensation=compensation,
        kept=OWN_WIDTHS, by_block=True, **SETTINGS,
    )  # fmt: skip
    compare_tiny(tmp_path / "out", tmp_path / "out.gguf")
    assert b"deci.attention.head_count" in (tmp_path / "out.gguf").read_bytes()


@pytest.mark.parametrize("dtype", ["f16", "bf16", "q8_0"])
def test_files_of_fewer_bits_are_near(dtype, tmp_path):
    folder = tm.save(tm.tiny("llama", torch.float32), tmp_path / "model")
    coec.export(folder, tmp_path / "out.gguf", dtype=dtype, no_tokenizer=True)
    bound = {"f16": 1e-2, "bf16": 5e-2, "q8_0": 0.15}[dtype]
    assert 1e-5 < difference(tmp_path / "out.gguf", folder) < bound  # it is not the f32 file


@pytest.mark.parametrize(
    "kept",
    [{"multiple_of": "256"}, {"multiple_of": "256", "by_block": True}],
)
def test_its_own_program_quantises_what_was_pruned(kept, tokens, tmp_path):
    import llama_cpp

    network = tm.tiny("llama", torch.float32, hidden_size=256, intermediate_size=1024, head_dim=32)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.mul_(0.3)
    tm.save(network, tmp_path / "dense")
    settings = {**SETTINGS, "preset": "fast", "sparsity": 0.4, "attention_sparsity": 0, **kept}
    coec.prune(tmp_path / "dense", tmp_path / "out", calibration=tokens, **settings)
    whole, quantised = tmp_path / "out.gguf", tmp_path / "quantised.gguf"
    coec.export(tmp_path / "out", whole, dtype="f16", no_tokenizer=True)
    how = llama_cpp.llama_model_quantize_default_params()
    how.ftype, how.nthread = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M, 1
    paths = (str(path).encode() for path in (whole, quantised))
    assert not llama_cpp.llama_model_quantize(*paths, ctypes.byref(how))
    assert quantised.stat().st_size < 0.45 * whole.stat().st_size
    assert 1e-3 < difference(quantised, tmp_path / "out") < 0.3


@pytest.mark.parametrize("name", [*bt.CUTS, "pieces", "always", "first", "never"])
def test_texts_become_the_same_ids(name, tmp_path):
    model = tm.tiny("llama", torch.float32, vocab_size=bt.SIZE)
    folder = tm.save(model, tmp_path / "model", tokenizer=False)
    if name in bt.CUTS:
        bt.save_bytes(folder, name)
    else:
        bt.save_pieces(folder, bt.pieces(**({} if name == "pieces" else bt.metaspace(name))))
    result = coec.export(folder, tmp_path / "out.gguf")
    check_texts(folder, tmp_path / "out.gguf", [*TEXTS, *bt.TEXT], exact=not result.notes)


def check_texts(folder, file, texts, *, exact=True):
    """Where the file has a note, only what the note is about may differ."""
    own, llama = AutoTokenizer.from_pretrained(folder), Llama(file)
    noted = [] if exact else [t for t in texts if t[:1] == " " or not t.isascii() or "<s>" in t]
    for text in texts:
        if text not in noted:
            assert llama.tokens(text) == own(text)["input_ids"], text
    llama.close()


@pytest.mark.parametrize("name", ["stories260K", "wt2-llama", "babyllama-1M"])
def test_the_shared_models(name, shared, tmp_path):
    folder, out = shared / "models" / name, tmp_path / "out.gguf"
    has_kind = name != "babyllama-1M"  # its tokenizer squeezes spaces and has no bytes
    compare(folder, out, random_ids(Dense.open(folder).vocabulary, 200), 8)
    if has_kind:
        coec.export(folder, out, force=True)
        text = (shared / "data/wikitext-2/valid.raw.txt").read_text(encoding="utf-8")[:50_000]
        check_texts(folder, out, [*TEXTS, text])


def test_perplexity_of_a_pruned_model(shared, tmp_path):
    """Ours, and that of llama.cpp's logits over the same windows."""
    text = shared / "data/wikitext-2/test.raw.txt"
    coec.prune(shared / "models/wt2-llama", tmp_path / "pruned", sparsity=0.3, samples=16,
               seq_len=256, calibration=str(shared / "data/wikitext-2/valid.raw.txt"),
               compensation="ridge-to-slice", preset="paper")  # fmt: skip
    coec.export(tmp_path / "pruned", tmp_path / "out.gguf")
    ours = coec.perplexity(tmp_path / "pruned", text, seq_len=256, max_windows=8)
    windows = windows_in_order(
        Dense.open(tmp_path / "pruned"), text, "text", count=8, seq_len=256,
        trust_remote_code=False,
    ).ids  # fmt: skip
    llama = Llama(tmp_path / "out.gguf")
    losses = [
        torch.nn.functional.cross_entropy(llama.logits(ids.tolist())[:-1].double(), ids[1:])
        for ids in windows.long()
    ]
    assert float(torch.stack(losses).mean().exp()) == pytest.approx(ours.perplexity, abs=1e-3)
