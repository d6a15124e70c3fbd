"""The compensations by name, and the definition of a method: a function and its declarations."""

import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import create_model

from coec.config import called, without_effect
from coec.config.recipe import CoecOptions, Options, RidgeOptions
from coec.errors import OptionError, did_you_mean
from coec.methods.closed_form import bias, least_squares, none, rcpu, ridge_to_slice
from coec.methods.coec import coec
from coec.types import SiteProblem, SiteResult

PARTS = frozenset({"value"})
"""Parts of a problem that are prepared only for methods which need them."""
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True)
class Method:
    """A compensation, with what must be known of it before it runs.

    Attributes:
        function: `(problem, options) -> SiteResult` if `options` says which options; otherwise
            `(problem, *, options) -> SiteResult`, whose options are its keyword-only arguments.
        adds_bias: whether results may carry a bias, which decides the output format before any
            work. A bias that was not declared is refused.
        needs: the parts of the problem that are to be prepared: `value`, the pruned value
            projection at sites that follow attention.
        options: the class of the options.
        shrinks: whether results stay near the slice by themselves if tokens are few; `compensate`
            draws others back to it.
    """

    function: Callable[..., SiteResult]
    adds_bias: bool = False
    needs: Collection[str] = frozenset()
    options: type[Options] | None = None
    shrinks: bool = False

    def __post_init__(self) -> None:
        needs = {self.needs} if isinstance(self.needs, str) else self.needs
        object.__setattr__(self, "needs", frozenset(needs))
        if unknown := sorted(frozenset(self.needs) - PARTS):
            raise OptionError(
                f"compensation '{self.name}' needs '{unknown[0]}', which no problem has; a method "
                f"can need {', '.join(sorted(PARTS))}"
            )
        _check_form(self)

    @classmethod
    def of(cls, choice: Any) -> "Method":
        """Return the method of a name, or of a function that declares nothing.

        Raises:
            OptionError: there is none of that name, or the function has another form.
        """
        if isinstance(choice, Method):
            return choice
        if callable(choice):
            return cls(choice)
        if not isinstance(choice, str) or choice not in COMPENSATIONS:
            raise OptionError(f"unknown compensation '{choice}'; known: {', '.join(COMPENSATIONS)}")
        return COMPENSATIONS[choice]

    @property
    def name(self) -> str:
        """Name in messages and reports: the one it is listed under, or its function's."""
        listed = (name for name, method in COMPENSATIONS.items() if method == self)
        return next(listed, called(self.function))

    @functools.cached_property
    def settings(self) -> type[Options]:
        """The class of the options; of a function that declares none, made of its keywords."""
        if self.options is not None:
            return self.options
        empty = inspect.Parameter.empty
        fields: dict[str, Any] = {
            argument.name: (
                Any if argument.annotation is empty else argument.annotation,
                ... if argument.default is empty else argument.default,
            )
            for argument in inspect.signature(self.function).parameters.values()
            if argument.kind is argument.KEYWORD_ONLY
        }
        return create_model(f"Options of {self.name}", __base__=Options, **fields)

    @property
    def defaults(self) -> dict[str, Any]:
        """The options that have a default, with it."""
        fields = self.settings.model_fields
        return {name: field.default for name, field in fields.items() if not field.is_required()}

    def chosen(self, given: Mapping[str, Any]) -> Options:
        """Return the options, checked.

        Raises:
            OptionError: one is unknown, missing, not allowed, or without effect with the others.
        """
        names = self.settings.model_fields
        for option in sorted(set(given) - set(names)):
            raise OptionError(
                f"compensation '{self.name}' has no option '{option}'"
                + (did_you_mean(option, names) or f"; its options: {', '.join(names) or 'none'}")
            )
        options = self.settings(**given)
        for option, why in options.idle().items():
            if option in given and given[option] != self.defaults.get(option):
                raise without_effect(option, f"with {why}")
        return options

    def __call__(self, problem: SiteProblem, options: Options) -> SiteResult:
        """Run it, and check the result against its declarations.

        Raises:
            OptionError: the returned value is no `SiteResult`, does not fit the problem, or has
                an undeclared bias.
        """
        if self.options is not None:
            result = self.function(problem, options)
        else:
            result = self.function(problem, **dict(options))
        if not isinstance(result, SiteResult):
            raise OptionError(
                f"compensation '{self.name}' must return a coec.SiteResult, got "
                f"{type(result).__name__}"
            )
        if result.bias is not None and not self.adds_bias:
            raise OptionError(
                f"compensation '{self.name}' returns a bias without having declared it: pass "
                f"coec.Method({self.name}, adds_bias=True)"
            )
        rows, dtype = len(problem.dense), problem.dense.dtype
        shapes = {"weight": (rows, len(problem.kept.indices)), "bias": (rows,)}
        for name, shape in shapes.items():
            tensor = getattr(result, name)
            if tensor is not None and (tensor.shape != shape or tensor.dtype != dtype):
                raise OptionError(
                    f"compensation '{self.name}' must return a {name} of shape {shape} in {dtype}, "
                    f"got {tuple(tensor.shape)} in {tensor.dtype}"
                )
        return result


def _check_form(method: Method) -> None:
    """Raise OptionError unless the function can be called with a problem."""
    try:
        parameters = inspect.signature(method.function).parameters.values()
    except (TypeError, ValueError) as error:
        raise OptionError(
            f"compensation '{method.name}' is no function whose arguments can be asked for: {error}"
        ) from error
    # *args takes whatever comes: nothing can be said against it.
    if any(argument.kind is argument.VAR_POSITIONAL for argument in parameters):
        return
    positional = [argument for argument in parameters if argument.kind in _POSITIONAL]
    needed = [argument.name for argument in positional if argument.default is argument.empty]
    count = 2 if method.options else 1
    if len(needed) > count or len(positional) < count:
        form = "(problem, options)" if method.options else "(problem, *, options)"
        raise OptionError(
            f"compensation '{method.name}' takes ({', '.join(needed)}): write it as "
            f"{method.name}{form} -> coec.SiteResult, with problem.weight, problem.gram and "
            "problem.kept"
        )


COMPENSATIONS: dict[str, Method] = {
    "coec": Method(coec, needs={"value"}, options=CoecOptions),
    "rcpu": Method(rcpu),
    "bias": Method(bias, adds_bias=True),
    "least-squares": Method(least_squares, options=RidgeOptions),
    "ridge-to-slice": Method(ridge_to_slice, options=RidgeOptions, shrinks=True),
    "none": Method(none, shrinks=True),
}
