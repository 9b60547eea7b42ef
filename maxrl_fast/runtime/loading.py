"""Custom code by name: FILE.py:NAME or package.module:NAME. Reward workers import this, so it must
not import torch."""

import contextlib
import importlib
import importlib.util
import inspect
import os
import reprlib
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from maxrl_fast.errors import InputError, UserCodeError, nearest

CLASSIFIER = "hf:"
OBJECT = "python:"  # of a Python object that was given to maxrl_fast.run
NOT_MODULES = ("gym", "python")  # what stands before the colon of --task gym:NAME, and of objects
SHORT_REPR = reprlib.Repr()
SHORT_REPR.maxstring = SHORT_REPR.maxother = 80
PACKAGE = str(Path(__file__).parents[1])
_loaded = set[str]()  # files of the user's, which may be in an installed package


class LoadError(Exception):
    """A name cannot be loaded."""


def is_file(name: str) -> bool:
    return name.rpartition(":")[0].endswith(".py")


def is_code(name: str) -> bool:
    module, _, attribute = name.rpartition(":")
    words = [*module.split("."), attribute]
    return is_file(name) or (all(map(str.isidentifier, words)) and module not in NOT_MODULES)


def lost_object(option: str, name: str) -> InputError:
    return InputError(
        f"--{option} {name} is a Python object that was given to maxrl_fast.run, which only its "
        f"caller has; give it there again, as {option}=..."
    )


def absolute_name(name: str) -> str:
    """Return the name of code or of a classifier, hf:DIR, with an absolute path, for a run that is
    resumed from another folder."""
    if name.startswith(CLASSIFIER):
        return f"{CLASSIFIER}{Path(name.removeprefix(CLASSIFIER)).absolute()}"
    file, _, attribute = name.rpartition(":")
    return f"{Path(file).absolute()}:{attribute}" if is_file(name) else name


@cache
def load_code(option: str, name: str, wanted: str) -> Any:
    """`wanted` is "FUNCTION" or "CLASS"."""
    try:
        return load(name)
    except LoadError as error:
        form = "FILE.py" if is_file(name) else "package.module"
        raise InputError(f"--{option} {name} must be {form}:{wanted}: {error}") from error


def build_from_code(
    option: str,
    name: str,
    protocol: type,
    offered: Mapping[str, Any],
    arguments: Mapping[str, Any],
    hint: str,
) -> Any:
    """Construct an option's class with `arguments` and those of `offered` that it takes, and check
    its members. `hint` ends the message about wrong parameters."""
    who, cls = f"--{option} {name}", load_code(option, name, "CLASS")
    if not inspect.isclass(cls):
        raise InputError(f"{who} must be a class, got {cls!r:.80}")
    try:
        signature = inspect.signature(cls)  # ValueError: of a class that is written in C
        given = {key: x for key, x in offered.items() if key in signature.parameters}
        given |= arguments
        signature.bind(**given)
    except (TypeError, ValueError) as error:
        takes = f"must take {', '.join([*offered, *arguments])} by name, or some of them"
        raise InputError(f"{who} {takes}: {error}{hint}") from error
    built = cls(**given)
    check_members(who, built, protocol)
    return built


def check_members(who: str, value: object, protocol: type) -> None:
    """Refuse an object that lacks a protocol's member, or whose method takes other arguments. A
    method that is inherited from the protocol counts as missing."""
    methods = {name: x for name, x in vars(protocol).items() if inspect.isfunction(x)}
    for name, asked in methods.items():
        if name.startswith("_"):
            continue
        _, *parameters = inspect.signature(asked).parameters.values()
        wanted = f"{who} must have the method {name}({', '.join(x.name for x in parameters)})"
        own = getattr(value, name, None)
        if not callable(own) or getattr(own, "__func__", None) is asked:
            raise InputError(f"{wanted}, which it does not")
        by_name = [x.name for x in parameters if x.kind is x.KEYWORD_ONLY or x.default != x.empty]
        positional = [None] * (len(parameters) - len(by_name))
        try:
            inspect.signature(own).bind(*positional, **dict.fromkeys(by_name))
        except TypeError:
            raise InputError(f"{wanted}, got {name}{inspect.signature(own)}") from None
    for name in protocol.__annotations__:
        if not hasattr(value, name):
            raise InputError(f"{who} must have the attribute {name}, which it does not")


def load(name: str) -> Callable[..., Any]:
    """LoadError says why "path/to/file.py:name" or "package.module:name" cannot be loaded."""
    place, _, attribute = name.rpartition(":")
    path = Path(place).resolve() if place.endswith(".py") else None
    if path and not path.is_file():
        raise LoadError(f"there is no file {place}")
    try:
        module = _load_file(path) if path else importlib.import_module(place)
        function = getattr(module, attribute, None)
    except BaseException as error:  # SystemExit too
        raise LoadError(f"importing {place} failed: {describe_error(error)}") from error
    _loaded.add(getattr(module, "__file__", None) or "")
    if function is None:
        names = [x for x, value in vars(module).items() if callable(value) and x[0] != "_"]
        raise LoadError(f"{place} has no {attribute}{nearest(attribute, names)}")
    if not callable(function):
        raise LoadError(f"{attribute} in {place} is not a function: {SHORT_REPR.repr(function)}")
    return function


def _load_file(path: Path) -> ModuleType:
    """Import a file; as in a script, it can import modules in its folder."""
    sys.path.insert(0, str(path.parent))
    is_taken = path.stem in sys.modules or path.stem in sys.stdlib_module_names
    name = f"reward_{path.stem}" if is_taken else path.stem
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec  # the name ends in .py
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def naming_user_code() -> Iterator[None]:
    """What a user's code raises, be it SystemExit, becomes a UserCodeError with file and line."""
    try:
        yield
    except (KeyboardInterrupt, GeneratorExit, MemoryError):
        raise
    except BaseException as error:
        cls = type(error)
        is_known = cls.__module__.startswith("maxrl_fast.") or "OutOfMemory" in cls.__name__
        if is_known or not place_of(error):
            raise
        raise UserCodeError(describe_error(error)) from error


def describe_error(error: BaseException, with_place: bool = True) -> str:
    """Return type and message, and the last line of the user's code."""
    try:
        text = str(error)[:500]
        if isinstance(error, SystemExit) and not isinstance(error.code, str):  # but a tensor
            text = SHORT_REPR.repr(error.code)
    except BaseException:
        text = "(its message cannot be printed)"
    return f"{type(error).__name__}: {text}" + place_of(error) * with_place


def place_of(error: BaseException) -> str:
    """Return " (FILE, line N)", the last line of its traceback in a file of the user's."""
    places = [(x.f_code.co_filename, line) for x, line in traceback.walk_tb(error.__traceback__)]
    own = [(file, line) for file, line in places if _is_users(file)]
    return f" ({os.path.basename(own[-1][0])}, line {own[-1][1]})" if own else ""


def _is_users(file: str) -> bool:
    libraries = PACKAGE, sysconfig.get_path("stdlib"), "-packages", "torchinductor"
    is_made_up = file.startswith("<") and not file.startswith(("<stdin>", "<ipython"))
    return file in _loaded or not (is_made_up or any(name in file for name in libraries))
