"""The compensations by name, and `Method`: a function with its declarations."""

import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from coec.compensation.closed_form import bias, least_squares, none, rcpu, ridge_to_slice
from coec.compensation.coec import coec
from coec.errors import OptionError
from coec.settings import CoecOptions, RidgeOptions, Setting
from coec.settings.fields import of_annotation, without_effect
from coec.settings.options import Options
from coec.types import SiteProblem, SiteResult

PARTS = frozenset({"value"})
"""Parts of a problem that are prepared only for methods which need them."""

POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True)
class Method:
    """A compensation and its declarations, which are known before it runs.

    Attributes:
        function: `(problem, options) -> SiteResult` where `options` says which options; otherwise
            `(problem, *, options) -> SiteResult`, whose options are its keyword-only arguments.
        adds_bias: whether results may carry a bias, which decides the output format before any
            work. One that was not declared is refused.
        needs: parts of the problem to prepare: `value`, the pruned value projection at attention
            sites.
        options: the dataclass of the options.
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

    @property
    def settings(self) -> tuple[Setting, ...]:
        """Options of the method."""
        return self.options.table() if self.options else _keywords(self.function)

    @property
    def defaults(self) -> dict[str, Any]:
        """The options that have a default, with it."""
        return {item.name: item.default for item in self.settings if item.default is not REQUIRED}

    def chosen(self, given: Mapping[str, Any]) -> "Options | dict[str, Any]":
        """The options as the function takes them, checked.

        Raises:
            OptionError: an option is unknown, missing, not allowed, or has no effect.
        """
        # Unknown or bad options first, then missing ones, then those without effect.
        options = self._checked(given)
        for item in self.settings:
            if item.default is REQUIRED and item.name not in options:
                raise OptionError(f"compensation '{self.name}' needs the option '{item.name}'")
        for option, why in self.idle(options).items():
            raise without_effect(option, why)
        return self.options(**options) if self.options else options

    def idle(self, given: Mapping[str, Any]) -> dict[str, str]:
        """Return the options that differ from their default to no effect, each with the reason.

        Raises:
            OptionError: an option is unknown or not allowed.
        """
        options, defaults = self._checked(given), self.defaults
        if self.options is None:
            return {}
        idle = self.options(**options).idle()
        return {o: idle[o] for o in idle if o in options and options[o] != defaults[o]}

    def __call__(self, problem: SiteProblem, options: "Options | dict[str, Any]") -> SiteResult:
        """Run the method, and check its result against its declarations.

        Raises:
            OptionError: the result is no `SiteResult`, does not fit the problem, or has a bias that
                was not declared.
        """
        if isinstance(options, Options):
            result = self.function(problem, options)
        else:
            result = self.function(problem, **options)
        self._check_result(result, problem)
        return result

    def _check_result(self, result: object, problem: SiteProblem) -> None:
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
        rows, dtype = len(problem.weight), problem.weight.dtype
        shapes = {"weight": (rows, len(problem.kept.indices)), "bias": (rows,)}
        for name, shape in shapes.items():
            tensor = getattr(result, name)
            if tensor is not None and (tensor.shape != shape or tensor.dtype != dtype):
                raise OptionError(
                    f"compensation '{self.name}' must return a {name} of shape {shape} in {dtype}, "
                    f"got {tuple(tensor.shape)} in {tensor.dtype}"
                )

    def _checked(self, given: Mapping[str, Any]) -> dict[str, Any]:
        known = {item.name: item for item in self.settings}
        for option in sorted(set(given) - set(known)):
            takes = ", ".join(known) or "none"
            raise OptionError(
                f"compensation '{self.name}' has no option '{option}'; its options: {takes}"
            )
        return {option: known[option].checked(value) for option, value in given.items()}


def called(function: Callable[..., Any]) -> str:
    """Return the name of a function in messages and reports; the same in every process."""
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__))


REQUIRED = inspect.Parameter.empty
"""The default of an option that must be given."""


def _keywords(function: Callable[..., SiteResult]) -> tuple[Setting, ...]:
    """The options of a function: its keyword-only arguments; annotations say their kinds."""
    parameters = inspect.signature(function).parameters.values()
    return tuple(
        of_annotation(argument.name, argument.annotation, argument.default)
        for argument in parameters
        if argument.kind is argument.KEYWORD_ONLY
    )


def _check_form(method: Method) -> None:
    """Raises OptionError unless the function can be called with a problem, and shows how."""
    try:
        parameters = inspect.signature(method.function).parameters.values()
    except (TypeError, ValueError) as error:
        raise OptionError(
            f"compensation '{method.name}' is no function whose arguments can be asked for: {error}"
        ) from error
    # *args takes whatever comes: nothing can be said against it.
    if any(argument.kind is argument.VAR_POSITIONAL for argument in parameters):
        return
    positional = [argument for argument in parameters if argument.kind in POSITIONAL]
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
