"""The parts of a recipe."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from coec.errors import OptionError
from coec.settings.fields import Settings, check_seed, plain, setting, without_effect

SelectionName = Literal["rcpu", "wanda-sp", "flap", "obs", "magnitude", "random"]
CompensationName = Literal["coec", "rcpu", "bias", "least-squares", "ridge-to-slice", "none"]
PresetName = Literal["paper", "fast", "balanced", "best"]
DEFAULT_PRESET: PresetName = "balanced"
"""The preset where none is named; a part that is made by itself has the paper's defaults."""
TargetName = Literal["hf", "vllm", "llama.cpp"]
Allocation = Literal["uniform", "adaptive", "error"]
AttentionUnits = Literal["groups", "heads", "auto"]
ExecutorName = Literal["here", "ray"]
KvGroups = Literal["uniform", "all", "held-out"]
TokenWeights = Literal["equal", "residual"]
StartRule = Literal["auto", "on", "off"]
DtypeName = Literal["float64", "float32", "bfloat16", "float16"]
SolveDtypeName = Literal["auto", "float64", "float32"]
LARGEST_MULTIPLE = 2**20
CHOOSING = (
    "sparsity", "attention_units", "attention_sparsity", "mlp_sparsity", "expert_sparsity",
    "drop_blocks", "budget_parameters", "budget_memory", "context", "multiple_of",
    "tensor_parallel", "allocation", "selection", "kept",
)  # fmt: skip
"""Settings that say which units stay."""
DTYPE_NAMES: tuple[str, ...] = get_args(DtypeName)

Source: TypeAlias = str | Path | Any
"""`wikitext2`, `c4`, `hub:…`, `self`, a path, a mixture, a list of strings, a data set of
`datasets`, or a tensor or array of token ids (n, or windows × length)."""
Kept: TypeAlias = str | Path | Any
"""A file or folder, a mapping of indices by site, or kept units that were read already."""


def check_sparsity(sparsity: float, name: str = "sparsity") -> None:
    """Raises OptionError unless the fraction removed lies strictly between 0 and 1."""
    if not 0 < sparsity < 1:
        raise OptionError(
            f"{name} is the fraction of units removed, strictly between 0 and 1, got {sparsity:g}"
            + (f" (did you mean {sparsity / 100:g}?)" if 1 < sparsity < 100 else "")
        )


def _share_named(name: str) -> Callable[[float | None], None]:
    """Make a check of a fraction that may be 0 or None."""
    return lambda sparsity: check_sparsity(sparsity, name) if sparsity else None


def _must(be: str, holds: Callable[[Any], bool]) -> Callable[[Any], None]:
    """Make a check that raises OptionError with what a value must be, unless it is so or None."""

    def check(value: Any) -> None:
        if value is not None and not holds(value):
            raise OptionError(f"{be}, got {value!r:.80}")

    return check


def memory_size(size: str) -> int:
    """Return the bytes of a size such as 16GB (10⁹ each) or 14.5GiB (2³⁰); 0 where it is none."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt])(i?)b", size.strip(), re.IGNORECASE)
    if match is None:
        return 0
    power = "kmgt".index(match[2].lower()) + 1
    return int(float(match[1]) * (2**10 if match[3] else 10**3) ** power)


def _is_multiple(value: str) -> bool:
    return value == "auto" or (
        value.isdecimal() and value.isascii() and 0 < int(value) < LARGEST_MULTIPLE
    )


@dataclass(frozen=True, kw_only=True)
class Pruning(Settings):
    """Settings of what is removed, and how that is compensated.

    In Python `selection` may also be a function `(weight, gram) -> scores`, with any of `units`,
    `keep` and `seed` by keyword, and `compensation` a `Method` or a function
    `(problem, *, options) -> SiteResult`.

    Attributes:
        sparsity: Fraction of units removed, between 0 and 1.
        attention_units: Units that attention loses: whole KV `groups`, or query `heads`, as many in
            every group, which leaves the KV cache as it is. `auto` takes heads where no whole group
            would go, or where fewer groups could not be divided over as many GPUs. A folder given
            as `kept` has units of its own.
        attention_sparsity: Fraction of these units removed; 0 keeps all.
        mlp_sparsity: Fraction of MLP channels removed, those of every expert included; 0 keeps all.
        drop_blocks: Number of whole blocks that are removed too, each time the one without which
            predictions change least. The first and the last block stay. Later blocks compensate the
            loss.
        expert_sparsity: Fraction of whole experts removed, as many in every block: those that add
            least to the tokens routed to them. The others also lose mlp_sparsity of their channels.
        budget_parameters: Largest number of parameters that remain, embeddings included; below 1, a
            fraction of the dense model's. Of a multimodal model the language model alone counts.
            Replaces sparsity.
        budget_memory: Memory that a server may use, such as 16GB or 14.5GiB, for the weights as
            written and the keys and values of `context` tokens. Replaces sparsity too.
        context: Number of tokens, over all sequences, whose keys and values budget_memory includes.
        multiple_of: Kept MLP channels are rounded up to a multiple of this; `auto` takes the
            largest of 256, 128, 64 and 32 that adds at most 3 % of them.
        tensor_parallel: Number of GPUs over which a server can divide every layer. Heads and
            channels are rounded up to multiples of it; with `multiple_of = auto`, channels to
            multiples of it times 256, 128, 64 or 32.
        allocation: Rule that distributes kept units over blocks: `uniform`; `adaptive`, by FLAP's
            standardised scores; or `error`, where a parameter lowers the output error most. The
            last two take a second dense pass and need non_uniform, with which every preset but
            `paper` uses `error`.
        non_uniform: Let widths differ by block. No stock class of transformers builds such a model:
            a page of code is written with the weights, and loaders need trust_remote_code.
        selection: Score that picks the units.
        kept: Units that stay, by site: a safetensors or JSON file, or a folder that coec pruned.
            Sites in it are not selected from.
        compensation: Method that compensates for removed units.
        dtype: Dtype of the written weights.
        target: Program that must load the result; it decides the model type that is written. `hf`
            is transformers, which loads every one. `vllm` with non_uniform writes nemotron-nas, a
            Llama whose channels differ by block but whose heads do not.
        solve_dtype: Dtype of the iterations of a compensation; decompositions and errors are
            float64. `auto` is float64 on a CPU, and on a GPU whose measured float64 rate is an
            eighth of its float32 rate or more; else float32.
        options: of the compensation, by name, as they were given; the recipe has them checked.
    """

    sparsity: float = setting(0.3, check=check_sparsity)
    attention_units: AttentionUnits = setting("groups")
    attention_sparsity: float | None = setting(
        None, otherwise="sparsity", least=0, check=_share_named("attention_sparsity")
    )
    mlp_sparsity: float | None = setting(
        None, otherwise="sparsity", least=0, check=_share_named("mlp_sparsity")
    )
    drop_blocks: int = setting(0, least=0)
    expert_sparsity: float = setting(0.0, least=0, check=_share_named("expert_sparsity"))
    budget_parameters: float | None = setting(
        None,
        otherwise="what sparsity leaves",
        check=_must(
            "budget_parameters is a number of parameters, or below 1 a share of the dense model's",
            lambda budget: budget > 0 and (budget < 1 or budget == int(budget)),
        ),
    )
    budget_memory: str | None = setting(
        None,
        otherwise="what sparsity leaves",
        check=_must(
            "budget_memory is a size such as 16GB, 900MB or 14.5GiB",
            lambda size: memory_size(size) > 0,
        ),
    )
    context: int = setting(8192, least=1)
    multiple_of: str = setting(
        "1",
        check=_must("multiple_of is a whole number of channels, at least 1, or auto", _is_multiple),
    )
    tensor_parallel: int = setting(1, least=1, most=16)
    allocation: Allocation = setting("uniform")
    non_uniform: bool = setting(False)
    selection: SelectionName | Callable[..., Any] = setting("rcpu")
    kept: Kept | None = setting(None, otherwise="none: all are selected", objects=True)
    compensation: CompensationName | Callable[..., Any] = setting("coec")
    options: dict[str, Any] = field(default_factory=dict)
    dtype: DtypeName | None = setting(None, otherwise="the model's")
    target: TargetName = setting("hf")
    solve_dtype: SolveDtypeName = setting("auto")

    def __post_init__(self) -> None:
        multiple = plain(self.multiple_of)
        if isinstance(multiple, int) and not isinstance(multiple, bool):  # as files have it
            object.__setattr__(self, "multiple_of", str(multiple))
        elif isinstance(multiple, str) and multiple.isdecimal() and multiple.isascii():
            object.__setattr__(self, "multiple_of", multiple.lstrip("0") or "0")
        super().__post_init__()
        options = {name: plain(value) for name, value in self.options.items()}
        object.__setattr__(self, "options", options)
        if self.allocation != "uniform" and not self.non_uniform:
            raise OptionError(
                f"allocation = {self.allocation} gives every block widths of its own, which no "
                "stock format holds: set non_uniform to write code beside the weights, or leave "
                "allocation out"
            )
        budgets = [
            name
            for name in ("budget_parameters", "budget_memory")
            if getattr(self, name) is not None
        ]
        if len(budgets) == 2:
            raise OptionError("budget_parameters and budget_memory are both a budget: give one")
        if budgets and len(self.own_shares) == 2:
            raise without_effect(budgets[0], "attention_sparsity and mlp_sparsity")

    def removed(self, site: str) -> float:
        """The fraction of units that goes at one kind of site."""
        share_of_kind = self.attention_sparsity if site == "attention" else self.mlp_sparsity
        return self.sparsity if share_of_kind is None else share_of_kind

    @property
    def budget(self) -> str | None:
        """The budget as it was given, such as `budget_memory = 16GB`; None where sparsity decides.

        A share stands as it is, parameters in full.
        """
        if self.budget_memory is not None:
            return f"budget_memory = {self.budget_memory}"
        if (left := self.budget_parameters) is None:
            return None
        return "budget_parameters = " + (f"{left:g}" if left < 1 else f"{left:,.0f}")

    @property
    def own_shares(self) -> frozenset[str]:
        """The kinds of sites that have a fraction of their own."""
        shares = {"attention": self.attention_sparsity, "mlp": self.mlp_sparsity}
        return frozenset(site for site, share in shares.items() if share is not None)

    @property
    def multiple(self) -> int | None:
        """Number whose multiple kept MLP channels are; None where it is chosen."""
        return None if self.multiple_of == "auto" else int(self.multiple_of)


@dataclass(frozen=True, kw_only=True)
class Reconstruction(Settings):
    """Settings beyond the paper: the pruned model runs beside the dense one, trained towards it.

    Attributes:
        preset: Set of defaults: `paper` (COEC as published), `fast` (closed forms, block after
            block), `balanced` (every block trained, briefly) or `best` (for longer); any setting
            given beside it wins.
        propagate: Calibrate each block on the pruned model's inputs, and correct the accumulated
            error.
        reconstruct: Passes over the calibration windows in which all weights of a block are trained
            towards the dense model's hidden states after it. 0 disables the training.
        reconstruct_rate: Learning rate of this training, relative to the root mean square of each
            stored weight matrix; it falls linearly to 0.
        prediction_passes: Passes in which the last block is then trained towards the dense model's
            predictions. 0 disables them.
        token_weights: Weights of tokens in statistics and training: `equal`, or `residual`, one
            over the mean square of the token's hidden state, by which the next norm divides.
        kv_groups: Number of KV groups that stay: `uniform`, by sparsity; `all`, with more channels
            removed for the same parameters; or `held-out`, whichever of these has the lower KL to
            the dense model on validation windows, or what allocation = error gives every block.
        left_out: why the pruned model is not run beside the dense one though the preset says so.
    """

    preset: PresetName = setting("paper", otherwise=DEFAULT_PRESET)
    propagate: bool = setting(False)
    reconstruct: int = setting(0, least=0)
    reconstruct_rate: float = setting(
        0.01, check=_must("reconstruct_rate is above 0 and below 1", lambda rate: 0 < rate < 1)
    )
    prediction_passes: int = setting(0, least=0)
    token_weights: TokenWeights = setting("equal")
    kv_groups: KvGroups = setting("uniform")
    left_out: str = ""

    @property
    def sequential(self) -> str | None:
        """The setting for which the pruned model is run beside the dense one; None for none.

        A block then waits for the ones before it.
        """
        switches = {
            "propagate": self.propagate,
            "reconstruct": self.reconstruct,
            "kv_groups": self.kv_groups == "held-out",
        }
        return next((name for name, value in switches.items() if value), None)

    def idle(self) -> dict[str, str]:
        """Settings that have no effect beside the others, and why."""
        idle: dict[str, str] = {}
        if not self.reconstruct:
            idle |= dict.fromkeys(("reconstruct_rate", "prediction_passes"), "reconstruct = 0")
        if not (self.propagate or self.reconstruct):
            idle["token_weights"] = "neither propagate nor reconstruct"
        return idle


@dataclass(frozen=True, kw_only=True)
class Calibration(Settings):
    """Settings that statistics depend on, besides the dense model.

    Attributes:
        source: wikitext2; c4; hub:OWNER/NAME or hub:OWNER/NAME:CONFIG (their train splits); self
            (text sampled from the model); a .txt, .jsonl, .parquet, .npy or .safetensors file; or
            several of these but self, with shares of the windows: a.txt=2,b.jsonl=1.
        text_column: Column of a jsonl or parquet file, or of a hub: data set.
        samples: Calibration windows.
        seq_len: Tokens per window.
        seed: Random seed for drawing calibration windows.
        holdout: Fraction of the windows used for validation, at least one window; none of these is
            fitted on. The report has their error.
        guard: With few calibration tokens, shrink each compensation by its validation error.
            Without holdout, a quarter of the windows validates, and is fitted on in the end.
        bos: Begin every window with the tokens that the tokenizer puts before a text: `on`, `off`
            (only the first window may have them), or `auto`, whichever lets the dense model predict
            a few windows better. Windows given as token ids are not changed.
        forward_dtype: Dtype of the dense forward pass.
        guard_share: the fraction of the windows that `guard` sets aside for validation where
            `holdout` is 0; see `coec.calibration.windows.with_validation`.
        summed: True where training sums over tokens in the dtype of the forward pass.
    """

    source: Source = setting("wikitext2", key="calibration", objects=True)
    text_column: str = setting("text")
    samples: int = setting(128, least=1)
    seq_len: int | None = setting(None, otherwise="2048, or the model's maximum if less", least=2)
    seed: int = setting(0, least=0, check=check_seed)
    holdout: float = setting(
        0.0,
        check=_must(
            "holdout is a fraction of the windows, at least 0 and below 1",
            lambda holdout: 0 <= holdout < 1,
        ),
    )
    guard: bool = setting(True)
    bos: StartRule = setting("off")
    forward_dtype: DtypeName | None = setting(
        None,
        otherwise="the model's on a GPU, where training takes bfloat16 for float16; float32 on "
        "the CPU",
    )
    guard_share: float = 0.0
    summed: bool = False

    @property
    def validation(self) -> float:
        """Fraction of the windows whose statistics are summed apart."""
        return self.holdout or self.guard_share

    @property
    def own(self) -> bool:
        """True where the text is the model's own."""
        return isinstance(self.source, str) and self.source == "self"


@dataclass(frozen=True, kw_only=True)
class Runtime(Settings):
    """Settings of where work is done, by which results differ as rounding does, and of trust.

    Attributes:
        device: auto (a GPU where there is one), cpu, cuda, cuda:1, …
        executor: Where work is done: `here`, in this process, or on a `ray` cluster, by workers
            that share the windows and by tasks that solve the blocks. The result is the same.
        address: Address of a Ray cluster: HOST:PORT of its head, or auto for the cluster of this
            machine.
        workers: Workers that share the calibration windows.
        trust_remote_code: lets the model's tokenizer run Python code that comes with the model. A
            flag or a caller gives it, and no file can.
    """

    device: str = setting("auto")
    executor: ExecutorName = setting("here")
    address: str | None = setting(
        None, otherwise="a cluster of this machine alone, for the time of the run"
    )
    workers: int | None = setting(
        None, otherwise="one for each GPU, or for as many cores as a process uses", least=1
    )
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.executor != "ray":
            for name in ("address", "workers"):
                if getattr(self, name) is not None:
                    raise without_effect(name, f"executor = {self.executor}")
        if not isinstance(self.trust_remote_code, bool):
            raise OptionError(f"trust_remote_code is True or False, got {self.trust_remote_code!r}")
