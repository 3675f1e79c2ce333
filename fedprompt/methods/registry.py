"""The list of the gallery's methods, with what a study needs to know about each."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, TypeVar, cast, get_args

import fedprompt._refusals as check
from fedprompt._signatures import readable
from fedprompt.interfaces import Method
from fedprompt.methods.setting import Setting, plain_texts

__all__ = [
    "DIFFERENT_MODELS",
    "LEARNING_RATE",
    "METHODS",
    "PERSONALIZED",
    "PERSONALIZED_CLIP",
    "RANGES",
    "Entry",
    "Range",
    "adapted",
    "import_packages",
    "range_of",
    "register",
]

Range = tuple[float, float] | list[Any]
"""Pair of numbers, on a logarithmic scale, or a list of choices."""

LEARNING_RATE: dict[str, Range] = {"learning_rate": (1e-3, 1e-1)}
"""Range of the learning rate of most methods."""

PERSONALIZED = dict[str, Any](families=("one model",), traits=("personalized",))
"""Family and trait of methods whose clients get models of their own."""

PERSONALIZED_CLIP = PERSONALIZED | {"families": ("CLIP",)}
"""The same for prompts of a frozen CLIP."""

DIFFERENT_MODELS = dict[str, Any](
    families=("mixed models",), traits=("personalized", "different models")
)
"""Family and traits of methods whose clients may have models of different sizes."""


def adapted(marks: Mapping[str, Any]) -> dict[str, Any]:
    """Add the trait of methods of which a step is replaced or left out."""
    return {**marks, "traits": (*marks["traits"], "adapted")}


_FACTOR, _POSITIVE = partial(check.number, at_least=0), partial(check.number, above=0)
_SHARE, _FRACTION = partial(_FACTOR, at_most=1), partial(_POSITIVE, at_most=1)

RANGES: dict[str, Callable[[str, Any], None]] = {
    **dict.fromkeys(("temperature", "epsilon", "norm", "threshold", "capacity"), _POSITIVE),
    **dict.fromkeys(("mass", "outer_step", "energies"), _FRACTION),
    **dict.fromkeys(("alpha", "beta", "mix", "momentum", "decay", "share"), _SHARE),
    **dict.fromkeys(
        ("rate", "weight", "smoothing", "multiplier", "factor", "diversity", "margin", "offset"),
        _FACTOR,
    ),
    **dict.fromkeys(("rank", "components", "experts", "groups", "size"), check.count),
    **dict.fromkeys(("width", "depth", "contexts"), check.count),
    **dict.fromkeys(("steps", "up"), partial(check.count, at_least=0)),
}
"""Check of each hyperparameter by its name, or by the last word of its name."""

_Make = TypeVar("_Make", bound=Callable[..., Method])


@dataclass(frozen=True)
class Entry:
    """Method of the gallery.

    Attributes:
        name: Name of its function.
        title: Name in tables.
        make: Function ``(setting, *, hyperparameters) -> Method``.
        families: Families of tasks that it can run: "one model", "mixed models", "CLIP".
        traits: Traits such as "personalized", "different models", "public data", "private".
        search: Range of each hyperparameter that a study tunes.
        inputs: "images" if it needs images in place of the tokens of CLIP.

    Example:
        >>> from fedprompt.methods import METHODS
        >>> METHODS["fedprox"].defaults
        {'learning_rate': 0.01, 'proximal_weight': 0.01}
    """

    name: str
    title: str
    make: Callable[..., Method]
    families: Sequence[str]
    traits: Sequence[str]
    search: Mapping[str, Range]
    inputs: str

    @property
    def defaults(self) -> dict[str, Any]:
        """Default values of the hyperparameters, which are no functions."""
        return _hyperparameters(self.make)


class Prediction:
    """Prediction of a method, with the function that makes the method of another setting."""

    def __init__(
        self,
        predict: Callable[..., Any],
        make: Callable[..., Method],
        arguments: Sequence[Any],
        given: Mapping[str, Any],
    ) -> None:
        self._predict, self._make = predict, make
        self._arguments, self._given = arguments, given

    def __call__(self, data: Any, answer: Any, state: Any) -> Any:
        """Return the model of a client."""
        return self._predict(data, answer, state)

    def of(self, change: Callable[[Any], Any]) -> Callable[..., Any]:
        """Return the prediction of the same method of a changed setting."""
        arguments = [change(value) for value in self._arguments]
        given = {name: change(value) for name, value in self._given.items()}
        return self._make(*arguments, **given).predict


METHODS: dict[str, Entry] = {}
"""All methods by the name of their function."""


def register(
    title: str,
    *,
    families: Sequence[str],
    traits: Sequence[str] = (),
    search: Mapping[str, Range] | None = None,
    inputs: str = "",
) -> Callable[[_Make], _Make]:
    """Add a function to `METHODS`, which then checks its hyperparameters.

    The setting of its methods is its first argument, if the function gives them no other one.

    A hyperparameter whose default is a number must be a number in the range of its name, such as
    "rank" or "server_rate" (`RANGES`), or of the last word of its name. A piece must be a function.
    If you run a cell of a notebook again, its function takes the place of the former one.

    Args:
        title: Name in tables.
        families: Families of tasks that it can run.
        traits: Traits such as "personalized".
        search: Range of each hyperparameter that a study tunes.
        inputs: "images" if it needs images in place of the tokens of CLIP.

    Raises:
        ValueError: If `search` has a hyperparameter that the function does not have, or
            another method has the same name.

    Example:
        >>> from fedprompt.methods import METHODS, fedprox, register
        >>> @register("FedProx, strong", families=("one model",))
        ... def strong(setting, *, learning_rate=0.01):
        ...     return fedprox(setting, learning_rate=learning_rate, proximal_weight=1.0)
        >>> METHODS.pop("strong").defaults
        {'learning_rate': 0.01}
    """
    check.sequence("families", families, "names of families")
    check.sequence("traits", traits, "names of traits")

    def add(make: _Make) -> _Make:
        name = make.__name__
        ranges = dict(search or {})
        if unknown := sorted(ranges.keys() - _hyperparameters(make).keys()):
            rule = f"name hyperparameters of {name}: {', '.join(_hyperparameters(make))}"
            raise check.wrong("search", rule, unknown)

        @wraps(make)
        def checked(*arguments: Any, **given: Any) -> Method:
            for option, default in _hyperparameters(make).items():
                if option in given:
                    _check(option, given[option], default)
            for piece in _pieces(make) & given.keys():
                check.optional(check.function, piece, given[piece])
            made = make(*arguments, **given)
            check.instance(name, made, Method, "return a Method")
            settings = (one for one in (*arguments, *given.values()) if isinstance(one, Setting))
            setting = next(settings, None) if made.setting is None else made.setting
            predict = Prediction(made.predict, checked, arguments, given)
            values = inspect.signature(make).bind(*arguments, **given)
            values.apply_defaults()
            texts = [f"{key}={text}" for key, text in plain_texts(values.arguments).items()]
            title = f"{name}({', '.join(texts)})"
            return made._replace(predict=predict, setting=setting, name=title)

        cast(Any, checked).__signature__ = readable(inspect.signature(make))
        new = name not in METHODS or _runs_again(make, METHODS[name].make)
        check.require(new, "name", "be new among the methods", repr(name))
        METHODS[name] = Entry(name, title, checked, tuple(families), tuple(traits), ranges, inputs)
        return cast(_Make, checked)

    return add


def _runs_again(make: Callable[..., Method], before: Callable[..., Method]) -> bool:
    """Whether a function is another one of the same place, which is not within a function."""
    places = [(function.__module__, function.__qualname__) for function in (make, before)]
    return make is not before and places[0] == places[1] and "<locals>" not in make.__qualname__


def import_packages() -> None:
    """Import the modules that installed packages name in the group ``fedprompt.methods``.

    A module registers its methods when it is imported. A package that fails is warned of, and the
    other ones are imported all the same.
    """
    for point in entry_points(group="fedprompt.methods"):
        try:
            import_module(point.module)
        except Exception as error:
            package = point.dist.name if point.dist is not None else point.name
            text = f"Methods of the package {package} are left out: {point.module} raised {error!r}"
            warnings.warn(text, stacklevel=2)


def range_of(name: str) -> Callable[[str, Any], None] | None:
    """Return the check of a hyperparameter by its name, or by the last word of it."""
    return RANGES.get(name) or RANGES.get(name.rpartition("_")[2])


def _check(name: str, value: Any, default: Any) -> None:
    """Require a number in the range of a name where the default is a number, or a flag."""
    if isinstance(default, bool):
        check.flag(name, value)
    elif isinstance(default, tuple) and default and isinstance(value, tuple | list):
        for part, like in zip(value, default, strict=False):
            _check(name, part, like)
    elif isinstance(default, int | float) or (default is None and isinstance(value, int | float)):
        (range_of(name) or check.number)(name, value)


def _hyperparameters(make: Callable[..., Method]) -> dict[str, Any]:
    """Return keyword arguments and their defaults, without pieces that have a protocol as type."""
    options = inspect.signature(inspect.unwrap(make)).parameters.values()
    keywords = [option for option in options if option.kind is option.KEYWORD_ONLY]
    values = {one.name: one.default for one in keywords if not _is_piece(one.annotation)}
    return {name: value for name, value in values.items() if not callable(value)}


def _pieces(make: Callable[..., Method]) -> set[str]:
    """Return the arguments that have a protocol as type."""
    options = inspect.signature(inspect.unwrap(make)).parameters.values()
    return {option.name for option in options if _is_piece(option.annotation)}


def _is_piece(kind: Any) -> bool:
    return any(getattr(part, "_is_protocol", False) for part in get_args(kind) or (kind,))
