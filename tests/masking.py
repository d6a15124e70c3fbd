"""Dense models in which the channels and experts that a run removed have no effect."""

import torch
from safetensors.torch import load_file
from torch.overrides import TorchFunctionMode

from coec.models.calls import decoder_of
from coec.models.dense import Dense
from coec.types import KeptSet


class WithoutExperts(TorchFunctionMode):
    """Routers never choose some experts; `gone` has their numbers by the place of the weight."""

    def __init__(self, gone):
        super().__init__()
        self.gone = gone

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.nn.functional.linear and args[1].data_ptr() in self.gone:
            out = out.clone()
            out[..., self.gone[args[1].data_ptr()]] = -1e4
        return out


def masked(model, folder, out):
    """Set the columns of removed channels to 0; return the mode that passes removed experts by.

    `model` is the one in the folder, or the language model inside it; `out` is the run's folder.
    """
    kept, gone = load_file(out / "coec/kept.safetensors"), {}
    layers, _ = decoder_of(model)
    for block in Dense.open(folder).layout.blocks:
        layer = model.get_submodule(f"{layers}{block.index}")
        if (stay := kept.get(block.experts_key)) is not None:
            name = next(r.tensor for r in block.router if r.tensor.endswith("weight"))
            router = layer.get_parameter(name.removeprefix(block.prefix))
            gone[router.data_ptr()] = [n for n in range(len(router)) if n not in stay.tolist()]
        for site in block.sites:
            if site.key not in kept:
                continue
            dropped = site.kept_columns(KeptSet(kept[site.key], site.units)).dropped()
            weight(layer, site, block)[:, dropped] = 0
    return WithoutExperts(gone)


@torch.no_grad()
def weight(layer, site, block):
    """The weight of a consumer in a model of transformers, with a column for every channel."""
    name = site.consumer.removeprefix(block.prefix)
    if not site.routed:
        return layer.get_submodule(name).weight.data
    experts = layer.get_submodule(name.rpartition(f".{site.expert}.")[0])
    one = experts.down_proj.data[site.expert]
    return one.T if len(one) == site.columns != one.shape[1] else one
