"""What every architecture keeps, as checks of one model."""

import torch
from safetensors.torch import load_file

import coec
import tiny_models as tm
from coec.models.dense import Dense
from coec.streams.streams import Streams
from coec.types import GramSum, KeptSet
from prunings import CONTRACT


def check_that_a_written_checkpoint_is_the_masked_model(model, out, ids=None, **tolerance):
    expected = tm.logits(tm.masked(tm.load(model), out), ids)
    close = {"rtol": 0, "atol": 1e-10} | tolerance
    torch.testing.assert_close(tm.logits(tm.load(out), ids), expected, **close)


def check_that_removing_is_masking(model, tokens, out, units="groups", **settings):
    """Without compensation: the dense model with the removed units' outputs set to zero."""
    coec.prune(model, out, **CONTRACT, calibration=tokens, compensation="none",
               selection="magnitude", attention_units=units, **settings)  # fmt: skip
    kept = load_file(out / "coec/kept.safetensors")
    dense = tm.load(model)
    with torch.no_grad():
        for site in Dense.open(model).counted_in(units).layout.sites:
            columns = site.kept_columns(KeptSet(kept[site.key], site.units))
            tm.consumer(dense, site)[:, columns.dropped()] = 0
    difference = tm.logits(dense) - tm.logits(tm.load(out))
    assert float(difference.abs().max()) < 1e-10


def check_that_streamed_statistics_are_those_of_the_whole_model(model):
    ids = torch.randint(2, tm.VOCABULARY, (5, 32))
    checkpoint = Dense.open(model)
    plan = coec.plan(model, preset="paper", forward_dtype="float64", attention_units="groups")
    streams = Streams(plan, checkpoint, ids, pruned=False)
    measured = [(block, streams.measure(block)[1]) for block in checkpoint.layout.blocks]
    dense, sums = tm.load(model), {}
    for site in checkpoint.layout.sites:
        if site.routed:
            continue  # its inputs are those of no module: see below
        total = sums[site.key] = GramSum(site.columns)
        dense.get_submodule(site.consumer).register_forward_pre_hook(
            lambda _, args, total=total: total.update(args[0])
        )
    tm.logits(dense, ids)
    assert len(measured) == 2
    for block, summed in measured:
        for site in (one for one in block.sites if not one.routed):
            gram, expected = summed[site.name].gram(), sums[site.key].gram()
            assert gram.tokens == expected.tokens == 160
            torch.testing.assert_close(gram.xx, expected.xx, rtol=1e-9, atol=1e-9)
            torch.testing.assert_close(gram.x, expected.x, rtol=1e-9, atol=1e-9)
