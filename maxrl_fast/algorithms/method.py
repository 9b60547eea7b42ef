"""The methods that a run chooses by name: estimators of advantages, token losses, objectives and
corrections, and your own:

    @token_loss("Williams 1992", weight="1")
    def reinforce(t: Tokens) -> Tensor:
        \"\"\"-A logp.\"\"\"

The docstring up to an empty line is the formula, and what follows it a note. Keyword-only
parameters are options."""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from inspect import Parameter, getdoc
from typing import Any, ClassVar, Generic, TypeVar

from maxrl_fast.algorithms.arguments import check_choice, check_number
from maxrl_fast.algorithms.options import FINITE, REQUIRED, Option, options_of, parameters_of
from maxrl_fast.errors import nearest

AnyMethod = TypeVar("AnyMethod", bound="Method")
AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True, eq=False)  # methods are keys of caches
class Method:
    """Its formula, weight, needs and source, the publication and the code that the formula was
    compared with, are text for people."""

    name: str
    function: Callable[..., Any]
    source: str
    formula: str
    options: Mapping[str, Option]
    weight: str = "-"
    needs: str = "-"

    noun: ClassVar[str] = "method"
    first: ClassVar[str] = ""  # the first parameter of a function; "": it takes options alone
    of_users: ClassVar[Mapping[str, Any]] = {}  # fields of a function of the user's

    @classmethod
    def of(cls: type[AnyMethod], function: Callable[..., Any], **fields: Any) -> AnyMethod:
        name = name_of(function)
        if cls.first:
            parameters = parameters_of(function)
            positional = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
            if not parameters or parameters[0].kind not in positional:
                raise ValueError(f"{name} must take {cls.first} as its first parameter")
        if "options" not in fields:
            fields["options"] = options_of(function)
        made: dict[str, Any] = {"name": name, "function": function, "formula": formula_of(function)}
        return cls(**(made | {"source": str(getattr(function, "__module__", ""))} | fields))

    @property
    def shown_options(self) -> str:
        defaults = ((name, option.default) for name, option in self.options.items())
        numbers = (int, float)
        return " ".join(f"{x}={v:g}" if isinstance(v, numbers) else f"{x}={v}" for x, v in defaults)

    def resolve(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return all options; raise ValueError where one does not fit."""
        return check_options(self.name, self.options, given)


class Registry(Generic[AnyMethod]):
    def __init__(self, kind: type[AnyMethod]) -> None:
        self.kind = kind
        self.methods: dict[str, AnyMethod] = {}
        self.aliases: dict[str, AnyMethod] = {}

    def register(self, source: str, **fields: Any) -> Callable[[AnyFunction], AnyFunction]:
        """Register the decorated function, with these fields of its method. Raise ValueError if the
        name is taken, or the function has parameters that nothing gives."""

        def decorate(function: AnyFunction) -> AnyFunction:
            made = self.kind.of(function, source=source, **fields)
            known = self.methods.get(made.name)
            if known is not None and known.function.__module__ != function.__module__:
                raise ValueError(
                    f"there is a {made.noun} {made.name} already, in {known.function.__module__}: "
                    "choose another name"
                )
            self.methods[made.name] = made
            return function

        return decorate

    def find(self, method: str | Callable[..., Any] | AnyMethod) -> AnyMethod:
        """Return a method by its name, by its function, or as it is."""
        if isinstance(method, self.kind):
            return method
        if isinstance(method, str) and (known := (self.aliases | self.methods).get(method)):
            return known
        if isinstance(method, str) or not callable(method):
            raise ValueError(
                f"{self.kind.noun} must be one of {', '.join(self.methods)}, or a function of "
                f"{self.kind.first}, got {method!r:.80}"
            )
        known = self.methods.get(name_of(method))
        if known and known.function is method:
            return known
        kind: Any = self.kind
        make = _of_user if isinstance(method, Hashable) else _of_user.__wrapped__
        found: AnyMethod = make(kind, method)
        return found


@lru_cache(maxsize=256)
def _of_user(kind: Any, function: Callable[..., Any]) -> Any:
    return kind.of(function, **kind.of_users)


def name_of(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__name__", type(function).__name__)).rstrip("_")


def formula_of(function: Callable[..., Any]) -> str:
    """Return the docstring up to an empty line, as one line without a full stop."""
    return " ".join((getdoc(function) or "").partition("\n\n")[0].split()).rstrip(".")


def check_options(
    owner: str, options: Mapping[str, Option], given: Mapping[str, Any]
) -> dict[str, Any]:
    """Return all options of `owner`: given values and defaults; numbers are floats."""
    for name in (x for x in given if x not in options):
        takes = f"the options {', '.join(options)}" if options else "no options"
        raise ValueError(f"{owner} takes {takes}, got {name!r:.80}{nearest(str(name), options)}")
    checked = dict[str, Any]()
    for name, option in options.items():
        value, limit = given.get(name, option.default), option.limit or FINITE
        if value is None and option.default is None:
            continue
        if value is REQUIRED or value is None:
            raise ValueError(f"{owner} needs {name}, {limit.wanted}")
        if option.choices:
            check_choice(f"{name} of {owner}", value, option.choices)
            checked[name] = value
        else:
            checked[name] = check_number(f"{name} of {owner}", value, limit.wanted, limit.holds)
    return checked
