"""Models of low rank: solved, written, loaded, evaluated, resumed, and what refuses them."""

import copy
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM

import coec
import tiny_models as tm
from coec.allocation.ranks import stored
from coec.calibration.tokens import load_tokenizer
from coec.errors import CoecError, ModelError, OptionError
from coec.evaluation.efficiency import Workload
from coec.experiments.files import Store
from coec.experiments.grid import expand
from coec.experiments.sweep import sweep
from coec.exporting.export import export
from coec.models.architectures import ARCHITECTURES
from coec.models.dense import Dense
from coec.pipeline import low_rank as module
from coec.pipeline.card import changed
from coec.planning import ComputeConfig, Forecast
from coec.settings import Calibration, Pruning, Reconstruction, Runtime
from coec.streaming.passes import Backend
from coec.streaming.sensitivity import Truncations
from low_rank_prototype import Prototype

SETTINGS = {"preset": "paper", "samples": 12, "seq_len": 32, "low_rank": True}
CPU = torch.device("cpu")
TYPES = ("llama", "mistral", "qwen2", "qwen3", "granite", "seed_oss", "smollm3", "phi3",
         "ernie4_5", "starcoder2")  # fmt: skip
VARIANTS = [v for v, c in tm.VARIANTS.items() if c["model_type"] in TYPES]
REFUSED = [v for v in tm.VARIANTS if v not in VARIANTS]


@pytest.fixture(scope="module")
def ids(tmp_path_factory):
    return tm.token_file(tmp_path_factory.mktemp("ids") / "ids.npy")


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    return tm.save(tm.tiny("llama", torch.float32), tmp_path_factory.mktemp("dense") / "model")


@pytest.fixture(scope="module")
def made(dense, ids, tmp_path_factory):
    """A folder of low rank, and its report."""
    out = tmp_path_factory.mktemp("made") / "out"
    return out, prune(dense, out, ids)


def prune(model, out, ids, **settings):
    return coec.prune(model, out, calibration=ids, **SETTINGS | settings)


def whole_matrices(dense, folder):
    """The dense model with the matrices that the factors of a folder multiply to."""
    tensors = {n: t.double() for f in folder.glob("*.safetensors") for n, t in load_file(f).items()}
    network = copy.deepcopy(dense.network(CPU, torch.float64))
    own = dict(network.named_parameters())
    for name in own:
        parts = [
            f"{name.removesuffix('.weight')}.{p}" for p in ("pivots.weight", "coefficients.weight")
        ]
        if parts[0] in tensors:
            pivots, coefficients = (tensors[part] for part in parts)
            order = tensors[f"{name.removesuffix('.weight')}.order"].long()
            new = torch.cat([pivots, coefficients @ pivots])[order]
        elif name in tensors:
            new = tensors[name]
        own[name].data.copy_(new)
    return network


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_code_beside_the_weights_computes_what_the_package_does(
    variant, ids, tmp_path, modules
):
    """Loaded as a user does, and without the code by the package; saved and loaded again."""
    model = tm.save(tm.tiny(variant, torch.float32), tmp_path / "dense")
    report = prune(model, tmp_path / "out", ids)
    assert report.plan["loads_in"]["transformers"] == "with trust_remote_code=True"
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", trust_remote_code=True, dtype=torch.float64
    ).eval()
    assert type(loaded).__name__.startswith("LowRank")
    assert sum(p.numel() for p in loaded.parameters()) == report.plan["parameters"]["after"]
    dense, out = Dense.open(model), Dense.open(tmp_path / "out")
    assert out.parameters == report.plan["parameters"]["after"]
    for own in (out.network(CPU, torch.float64), whole_matrices(dense, tmp_path / "out")):
        torch.testing.assert_close(tm.logits(loaded), tm.logits(own), rtol=0, atol=1e-12)
    tm.check_use(loaded, tmp_path / "again")


@pytest.mark.parametrize("variant", ["llama", "qwen3", "phi3"])
def test_every_matrix_is_that_of_the_prototype(variant, ids, tmp_path):
    """Which keeps products in the dense shapes, each by one decomposition of the text's sums."""
    dense = Dense.open(tm.save(tm.tiny(variant, torch.float32), tmp_path / "dense"))
    prune(dense, tmp_path / "out", ids)
    settings = Calibration(source=ids, samples=12, seq_len=32)
    windows = Backend().dense_pass(dense, settings, Runtime(device="cpu")).draw().ids
    ranks = dict(coec.plan(dense, calibration=ids, **SETTINGS).ranks)
    prototype = Prototype(dense, windows)
    for block in dense.layout.blocks:
        prototype.solve(block, ranks)
    network = whole_matrices(dense, tmp_path / "out")
    for name, product in prototype.products.items():
        ours = network.get_parameter(name).float()
        torch.testing.assert_close(ours, product, rtol=0, atol=2e-3 * float(product.abs().max()))


@pytest.mark.parametrize("variant", REFUSED)
def test_blocks_that_add_something_else_are_refused(variant, ids, tmp_path):
    """Those of experts among them."""
    model = tm.save(tm.tiny(variant, torch.float32), tmp_path / "dense")
    added = ARCHITECTURES[tm.VARIANTS[variant]["model_type"]].adds
    with pytest.raises(OptionError, match=rf"^low_rank needs blocks that .*{added}: leave it out$"):
        prune(model, tmp_path / "out", ids)


def test_without_trust_nothing_is_loaded_by_mistake(made, modules):
    folder, _ = made
    for auto in (AutoModelForCausalLM, AutoModel):
        with pytest.raises(ValueError, match="trust_remote_code=True"):
            auto.from_pretrained(folder, trust_remote_code=False)
    assert load_tokenizer(folder)("the cat").input_ids


def test_so_many_parameters_go_as_the_settings_say(dense, ids, tmp_path):
    opened = Dense.open(dense)
    shapes = opened.matrices
    whole = sum(shape.numel() for shape in shapes.values())
    for settings, left in (
        ({"sparsity": 0.4}, int(0.6 * whole)),
        ({"budget_parameters": 0.8}, whole - opened.parameters + int(0.8 * opened.parameters)),
        ({"budget_parameters": opened.parameters - 5000}, whole - 5000),
    ):
        plan = coec.plan(opened, calibration=ids, **SETTINGS | settings)
        kept = sum(stored(shape, plan.ranks.get(n, min(shape))) for n, shape in shapes.items())
        assert left - min(map(sum, shapes.values())) < kept <= left
        assert plan.parameters_after == opened.parameters - whole + kept
    assert plan.widths.removed(opened.layout, opened.shapes) == 0


def test_the_record_says_what_was_done(dense, made):
    folder, report = made
    assert report.plan["code"] == "modeling_low_rank.py"
    assert report.plan["widths"]["o_proj_rank"] == {"before": 32, "after": [15, 14]}
    modules = {row["module"] for row in report.sites}
    assert modules == {name.removesuffix(".weight") for name in Dense.open(dense).matrices}
    assert all(0 < row["error_after"] < 1 and row["error_before"] is None for row in report.sites)
    card = (folder / "README.md").read_text()
    assert "low rank of the blocks' matrices, 0.3 of their parameters asked for" in card
    assert "`modeling_low_rank.py` does" in card
    assert "- transformers: with trust_remote_code=True" in card
    for word in ("selection", "compensat", "kept units", "widths of their own", "slice"):
        assert word not in card
    command = card[card.index("coec prune") : card.index("## Loads in")]
    assert "--low-rank" in command
    assert "--no-guard" not in command


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["paper", "fast", "balanced", "best"])
def test_the_recorded_settings_make_it_again(preset, dense, ids, tmp_path):
    """Every preset brings what low rank takes, and nothing that it refuses."""
    report = prune(dense, tmp_path / "out", ids, preset=preset)
    assert report.recipe["allocation"] == ("uniform" if preset == "paper" else "error")
    assert report.recipe["propagate"]
    assert report.recipe["reconstruct"] == 0
    again = {"preset": preset, "sparsity": report.recipe["sparsity"], **changed(report.recipe)}
    again["calibration"] = ids
    coec.prune(dense, tmp_path / "again", **again)
    first, second = (load_file(tmp_path / n / "model.safetensors") for n in ("out", "again"))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_the_model_is_evaluated_as_any_other(dense, made, ids):
    folder, report = made
    result = coec.perplexity(folder, ids, baseline=dense, seq_len=32)
    assert result.parameters == report.plan["parameters"]["after"]
    assert result.kl > 0
    cost = coec.efficiency(dense, folder)
    assert cost.pruned.parameters == report.plan["parameters"]["after"]


def test_speed_is_measured_as_of_any_other_and_frames_are_left_out(dense, made, run):
    folder, _ = made
    rates = coec.speed(dense, folder, load=Workload(prompt_tokens=4, new_tokens=2, repeats=1))
    assert rates.decode.pruned.median > 0
    command = ("analyze", dense, folder, "--no-speed", "--device", "cpu")
    assert run(*command, "--no-geometry")[0] == 0
    status, _, said = run(*command)
    assert status == 1
    assert "of low rank: leave it out (coec analyze --no-geometry)" in said


def test_a_sweep_measures_it_without_frames(dense, ids, tmp_path):
    (tmp_path / "grid.toml").write_text(f"""
preset = "paper"
samples = 6
seq_len = 32
low_rank = true
[[models]]
path = {str(dense)!r}
calibration = {str(ids)!r}
evaluate = {{ text = {str(ids)!r}, seq_len = 32, max_windows = 8 }}
""")
    cells = expand(str(tmp_path / "grid.toml"), evaluate={"distance": True, "geometry": True})
    assert sweep(cells, tmp_path / "out").failed == 0
    [row] = [row for row in Store(tmp_path / "out").rows.values() if not row.dense]
    assert row.measured("kl") > 0
    assert all(site.error_after > 0 and site.geometry.angle_oc is None for site in row.sites)


@pytest.mark.slow
@pytest.mark.parametrize(("lora", "rate"), [(None, 3e-4), (2, 3e-3)], ids=["weights", "additions"])
def test_it_is_trained_as_any_other_and_stays_what_it_was(
    lora, rate, dense, made, ids, tmp_path, modules
):
    folder, _ = made
    out = tmp_path / "out"
    report = coec.recover(
        dense, folder, out, text=ids, tokens=2048, seq_len=32, learning_rate=rate, lora=lora
    )
    assert report.recoveries[-1]["improved"]
    assert {p.relative_to(out) for p in out.rglob("*")} == {
        p.relative_to(folder) for p in folder.rglob("*")
    }
    for name in ("config.json", "modeling_low_rank.py"):
        assert (out / name).read_bytes() == (folder / name).read_bytes()
    before, after = (load_file(f / "model.safetensors") for f in (folder, out))
    for name, tensor in after.items():
        assert tensor.dtype == before[name].dtype
        trained = (".pivots.", ".coefficients.") if lora else ("",)
        trains = "order" not in name and any(part in name for part in trained)
        assert torch.equal(tensor, before[name]) != trains
    loaded = AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True).eval()
    own = Dense.open(out).network(CPU, torch.float32)
    torch.testing.assert_close(tm.logits(loaded), tm.logits(own))


@pytest.mark.slow
def test_narrow_weights_run_on_the_cpu(ids, tmp_path, modules):
    dense = tm.save(tm.tiny("qwen2", torch.bfloat16), tmp_path / "dense")
    prune(dense, tmp_path / "out", ids, allocation="error")
    result = coec.perplexity(tmp_path / "out", ids, baseline=dense, seq_len=32, dtype="bfloat16")
    assert 0 < result.kl < 1
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=True)
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
    assert torch.isfinite(tm.logits(loaded.eval())).all()


def test_nearly_all_parameters_give_nearly_the_dense_model(dense, ids, tmp_path):
    prune(dense, tmp_path / "out", ids, sparsity=0.02)
    near, far = (
        coec.perplexity(folder, ids, baseline=dense, seq_len=32).kl
        for folder in (tmp_path / "out", prune_more(dense, tmp_path, ids))
    )
    assert near < 0.05 * far


def prune_more(dense, folder, ids):
    prune(dense, folder / "more", ids, sparsity=0.6)
    return folder / "more"


def test_a_matrix_of_full_rank_stays_one(dense, ids, tmp_path, modules):
    """Ranks by error may leave some matrices whole."""
    costs = {}

    def spare(errors, measured):
        costs[len(costs)] = None  # the first matrix costs most
        return torch.linspace(1, 0, len(errors)).double() * (1e6 if len(costs) == 1 else 1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_curve", spare)
        report = prune(dense, tmp_path / "out", ids, allocation="error")
    names = load_file(tmp_path / "out/model.safetensors").keys()
    whole = {row["module"] for row in report.sites if row["units_after"] == row["units_before"]}
    assert report.sites[0]["module"] in whole
    assert len(whole) < len(report.sites)
    for row in report.sites:
        name = row["module"]
        assert (f"{name}.weight" in names) == (name in whole) != (f"{name}.order" in names)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=True)
    own = Dense.open(tmp_path / "out").network(CPU, torch.float32)
    torch.testing.assert_close(tm.logits(loaded.eval()), tm.logits(own))


def test_costs_are_those_of_one_matrix_truncated_alone(dense, ids):
    """What the models side by side cost is what whole models of transformers do."""
    opened, windows = Dense.open(dense), torch.randint(2, tm.VOCABULARY, (3, 32))
    models = Truncations(opened, windows, device=CPU, dtype=torch.float64)
    changed = {}
    for block in opened.layout.blocks:
        tensors = opened.tensors(block)
        name = block.sites[block.index].weight
        changed[name] = 0.5 * tensors[name]
        models.advance(block, tensors, [(name, 3, changed[name])])
    costs = models.costs()
    assert costs.keys() == changed.keys()

    @torch.no_grad()
    def predictions(network):  # of the last token nothing follows
        return network(input_ids=windows).logits[:, :-1].log_softmax(-1)

    expected = predictions(opened.network(CPU, torch.float64))
    for name, weight in changed.items():
        network = opened.network(CPU, torch.float64)
        network.get_parameter(name).data.copy_(weight)
        found = predictions(network)
        kl = (expected.exp() * (expected - found)).sum(-1).mean()
        assert costs[name] == {3: pytest.approx(float(kl), rel=1e-6)}


def test_costs_fall_with_the_rank_and_end_at_nothing(dense, ids, tmp_path, monkeypatch):
    curves = {}
    measure = module._curve

    def noted(errors, costs):
        curves[len(curves)] = curve = measure(errors, costs)
        return curve

    monkeypatch.setattr(module, "_curve", noted)
    prune(dense, tmp_path / "out", ids, allocation="error")
    assert len(curves) == 14
    for curve in curves.values():
        assert (curve.diff() <= 0).all()
        assert curve[0] > 0
        assert curve[-1] == 0


def test_ranks_by_cost_predict_better_than_uniform_ones(ids, tmp_path):
    """In a model one of whose blocks hardly does anything."""
    model = tm.tiny("llama", torch.float32)
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        model.get_submodule(f"model.layers.1.{name}").weight.data *= 0.02
    model = tm.save(model, tmp_path / "dense")
    kls = []
    for allocation in ("uniform", "error"):
        report = prune(model, tmp_path / allocation, ids, allocation=allocation, holdout=0.25)
        kls.append(report.reconstruction["kl"])
    assert kls[1] < 0.7 * kls[0]
    by_block = [0, 0]
    for row in report.sites:
        by_block[row["block"]] += row["units_after"]
    assert by_block[0] > by_block[1]


def test_errors_are_those_of_the_weights_that_are_written(dense, ids, tmp_path):
    """A narrow dtype adds its rounding to the error, and not much more."""
    reports = [
        prune(dense, tmp_path / dtype, ids, dtype=dtype) for dtype in ("float32", "bfloat16")
    ]
    dtypes = {n: t.dtype for n, t in load_file(tmp_path / "bfloat16/model.safetensors").items()}
    assert {dtype for name, dtype in dtypes.items() if name.endswith("order")} == {torch.int32}
    assert {d for name, d in dtypes.items() if not name.endswith("order")} == {torch.bfloat16}
    for exact, rounded in zip(*(report.sites for report in reports), strict=True):
        assert exact["error_after"] < rounded["error_after"] * 1.05
        assert rounded["error_after"] < exact["error_after"] * 1.2 + 1e-4


@pytest.mark.parametrize("allocation", ["uniform", "error"])
def test_an_interrupted_run_goes_on_to_the_same_bytes(
    allocation, dense, ids, tmp_path, monkeypatch
):
    solved, solve = [], module.LowRankReconstruction.solve

    def interrupted(self, block):
        if block.index:
            raise KeyboardInterrupt
        return solve(self, block)

    def counted(self, block):
        solved.append(block.index)
        return solve(self, block)

    def never(*_):
        raise AssertionError("measured again")

    settings = {"allocation": allocation, "final_norm": True}
    prune(dense, tmp_path / "plain", ids, **settings)
    monkeypatch.setattr(module.LowRankReconstruction, "solve", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prune(dense, tmp_path / "out", ids, **settings)
    monkeypatch.setattr(module.LowRankReconstruction, "solve", counted)
    monkeypatch.setattr(module, "_curve", never)
    prune(dense, tmp_path / "out", ids, **settings)
    assert solved == [1]
    for path in (tmp_path / "plain").rglob("*"):
        if path.is_file() and path.name != "coec.json":
            twin = tmp_path / "out" / path.relative_to(tmp_path / "plain")
            assert path.read_bytes() == twin.read_bytes()


REFUSALS = {
    "selection": ({"selection": "obs"}, "selection has no effect with low_rank"),
    "compensation": ({"compensation": "bias"}, "compensation has no effect with low_rank"),
    "option": ({"compensation": "ridge-to-slice", "ridge": 0.1}, "ridge has no effect with low_r"),
    "kept": ({"kept": {"layers.0.mlp": [0]}}, "kept has no effect with low_rank"),
    "share": ({"mlp_sparsity": 0.2}, "mlp_sparsity has no effect with low_rank"),
    "multiple": ({"multiple_of": 8}, "multiple_of has no effect with low_rank"),
    "experts": ({"expert_sparsity": 0.2}, "expert_sparsity has no effect with low_rank"),
    "by block": ({"non_uniform": True}, "non_uniform has no effect with low_rank"),
    "fits": ({"reconstruct": 1}, "reconstruct has no effect with low_rank"),
    "dense inputs": ({"propagate": False}, "propagate has no effect with low_rank"),
    "groups": ({"kv_groups": "all"}, "kv_groups has no effect with low_rank"),
    "adaptive": ({"allocation": "adaptive"}, "allocation = adaptive shares units, which low_rank"),
    "vllm": ({"target": "vllm"}, r"low_rank is not for target = vllm \(vLLM: not known"),
    "llama.cpp": ({"target": "llama.cpp"}, r"low_rank is not for target = llama.cpp \(llama.cpp: "),
    "too much": ({"sparsity": 0.99}, "low_rank stores [0-9,]+ parameters of the blocks' matrices"),
    "the method": ({"compensation": lambda problem: None}, "compensation has no effect with low"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_settings_without_meaning_are_refused(name, dense, ids, tmp_path):
    settings, said = REFUSALS[name]
    with pytest.raises(OptionError, match=said) as error:
        prune(dense, tmp_path / "out", ids, **settings)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_whole_parts_are_checked_too():
    with pytest.raises(OptionError, match="propagate has no effect with low_rank"):
        coec.Recipe(pruning=Pruning(low_rank=True))
    coec.Recipe(pruning=Pruning(low_rank=True), reconstruction=Reconstruction(propagate=True))


def test_statistics_alone_will_not_do(dense, ids, tmp_path):
    settings = {"samples": 12, "seq_len": 32}
    statistics = coec.collect(dense, tmp_path / "stats", calibration=ids, **settings)
    with pytest.raises(OptionError, match="^low_rank runs the pruned model over the text"):
        coec.prune(dense, tmp_path / "out", statistics=statistics, low_rank=True)


def test_models_of_low_rank_are_refused_where_whole_matrices_are_needed(dense, made, ids, tmp_path):
    folder, _ = made
    for call, purpose in (
        (lambda: prune(folder, tmp_path / "out", ids), "pruning"),
        (lambda: coec.plan(folder, calibration=ids), "pruning"),
        (lambda: coec.collect(folder, tmp_path / "out", calibration=ids), "collecting statistics"),
        (lambda: export(folder, tmp_path / "out.gguf"), "coec export"),
        (lambda: coec.geometry(dense, folder), "geometry"),
        (lambda: coec.geometry(folder, folder), "comparing units"),
        (lambda: coec.compensate_pruned(dense, folder, tmp_path / "out"), "matching units"),
    ):
        with pytest.raises(ModelError, match=f"^{purpose} needs whole matrices") as error:
            call()
        assert "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


def test_models_of_widths_by_block_are_refused(dense, ids, tmp_path):
    own = {"kept": {"layers.0.mlp": [0, 1, 2]}, "non_uniform": True, "low_rank": False}
    prune(dense, tmp_path / "by block", ids, **own)
    with pytest.raises(OptionError, match="low_rank is not for models whose widths differ"):
        prune(tmp_path / "by block", tmp_path / "out", ids)


@pytest.mark.parametrize("damage", ["rank", "blocks", "module", "kind", "order"])
def test_damaged_folders_are_refused(damage, made, tmp_path):
    folder, _ = made
    copied = shutil.copytree(folder, tmp_path / "copy")
    config = json.loads((copied / "config.json").read_text())
    if damage == "order":
        tensors = load_file(copied / "model.safetensors")
        tensors["model.layers.0.mlp.up_proj.order"] = torch.zeros(tm.FFN)
        save_file(tensors, copied / "model.safetensors")
    elif damage == "rank":
        config["ranks"][0]["mlp.up_proj"] = 10**6
    elif damage == "blocks":
        del config["ranks"][0]
    elif damage == "module":
        config["ranks"][0]["mlp.left_proj"] = 3
    else:
        config["ranks"] = 3
    (copied / "config.json").write_text(json.dumps(config))
    with pytest.raises(CoecError) as error:
        Dense.open(copied)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("allocation", ["uniform", "error"])
def test_the_plan_counts_matrices(allocation, dense, ids):
    plan = coec.plan(dense, calibration=ids, **SETTINGS | {"allocation": allocation})
    forecast = Forecast.of(plan, ComputeConfig.of(plan, CPU))
    names = [phase.name for phase in forecast.phases]
    assert ("allocating" in names) == (allocation == "error")
    assert all(phase.operations > 0 for phase in forecast.phases if "solving" in phase.name)
    assert any("decides the ranks" in note for note in plan.notes) == (allocation == "error")
