"""Whether two mathematical answers are equal: math-verify, with forms of numbers, units and
equations that it misreads, and without what is too large to compute."""

import re
from contextlib import suppress
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from typing import Any
from unicodedata import lookup, numeric

MOST_NESTED = 10  # brackets: the time for parsing doubles with each
# Factorials and exponents of five digits, towers, and large numbers in what the parser computes.
TOO_LARGE = re.compile(
    r"\d[\d,]{4,}\s*!|\([^()]*(?:\d{5}|\^|!)[^()]*\)\s*!|!\s*!\s*!|\^\s*\{?-?\d[\d,]{4}"
    r"|\^\{[^{}]*\d(?:!|\s*\^\s*\{?-?\d)"
    r"|(?:sum|prod|binom|choose|gcd|lcm|Gamma|mod).*(?:\d{6}|\d\d\^)"
)

SPACE = r"(?:\\[,;:! ]|~|\s)"
THOUSANDS = rf"(?<![\d.,/])[1-9]\d{{0,2}}(?:(?:{SPACE}|\{{,\}})+\d{{3}})+(?![\d/])"
POWER_OF_TEN = (  # 1.5 \times 10^{-7}, 1.5e-7 and 1e-05, but not 2e-1, which is algebra
    r"(?<![\w.^])(?:(\d+(?:\.\d+)?)\s*\\(?:times|cdot)\s*)?10\^(?:\{(-?\d\d?)\}|(\d\d?)\b)"
    r"|(?<![\w.])(?:(\d+\.\d+)[eE]|(\d+)(?:E|e(?=\+|-0|\d)|(?<=\b1)e))([+-]?\d\d?)(?![\w.])"
)
SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9}
UNITS = (  # that sympy lacks
    "sec 1 s min 60 s hr 1 h week 7 day in 1 inch lb 1 pound oz 1/16 lb ounce 1 oz cent .01 dollar"
)
QUANTITY = r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)\.?\s*(?:(?:,|and\b)\s*)?"
BOX = r"\\(?:text|mbox|mathrm)\w*\s*"
TEXT = re.compile(rf"{BOX}\{{\s*(and\b|or\b)?[^{{}}]*\}}")
DEGREE = r"(?:\^?\s*\{?\s*\\circ\s*\}?|°)"
UNIT = rf"{BOX}\{{(?!\s*(?:and|or)\b)[^{{}}]*\}}|{DEGREE}|\\?%"
MEASURED = (  # bare letters are a unit only if they do not look like variables
    rf"(.*?(?:[\d}})]|\\pi))({SPACE}*(?:{UNIT}"
    r"|(?:[cmk]m|[mk]g|m[lL]|in|ft|mi|lb|oz|hr|sq)\b|(?<= )(?!and\b)[A-Za-z]{3}"
    rf"|(?<=\d )[mgshLlNJW](?=[/^]|$))(?:{UNIT}|{SPACE}|\^\{{?\d\}}?|[\w/.])*)"
)
CALCULATION = re.compile(r"[\d+\-*/^!%]|\\(?:\w?frac|sqrt|cdot|times|div|pm|sin|cos|tan|log|ln)")


def equal(answer: str, given: str) -> bool:
    """Whether a given answer equals the correct one, as text or mathematically."""
    if max(len(answer), len(given)) > 4000:  # digits that Python reads
        return answer == given
    answer, given = _plain(answer), _plain(given)
    if re.sub(SPACE, "", given) == re.sub(SPACE, "", answer):
        return True
    if re.fullmatch("[A-Z]{2,},[A-Z]{2,}", f"{answer},{given}"):
        return False  # names of points, not products
    if "=" not in answer and not _is_named(given):
        return False
    (known, unit), (found, other) = _measured(answer), _measured(given)
    ratio = _size(other) / _size(unit)
    if ratio != 1 and ratio.is_number and _is_same(known, found.rpartition("=")[2], ratio):
        return True
    # A unit of only one side is ignored, but % and a base belong to the number.
    is_one_sided = not other or not (unit or re.match("%|percent|base", other))
    return (ratio == 1 or is_one_sided) and _is_same(known, found)


def _is_same(answer: str, given: str, ratio: Any = 1) -> bool:
    """Whether an answer without its unit equals a given one times a ratio."""
    from math_verify import verify
    from sympy import Expr, FiniteSet, Float, nsimplify

    if (answer, ratio) == (given, 1):
        return True
    # 6 decimal places, and of small numbers 5 significant digits
    zeros = max(map(len, re.findall(r"(?<!\d)0?\.(0*)[1-9]", answer)), default=0)
    places = max(6, 5 + zeros)
    known, found = _parsed(answer), _parsed(given)
    if ratio != 1:
        found = [ratio * nsimplify(x, rational=True) for x in found if isinstance(x, Expr)]
    # verify is not symmetric: the correct answer is first. The pool has its own time limit.
    if not verify(known, found, places, allow_set_relation_comp=True, timeout_seconds=None):
        return False
    one, other = known[0], found[0]
    if (r"\{" in answer) != (r"\{" in given):  # a pair is not a set
        return isinstance(one, FiniteSet) == isinstance(other, FiniteSet)
    if isinstance(one, Expr) and isinstance(other, Expr) and (one - other).is_number:
        # verify takes differences below 1e-10 for 0
        error = 1e-4 if (one - other).has(Float) else 1e-10
        return bool(abs((one - other).evalf()) <= error * abs(one.evalf()))
    return True


def _plain(text: str) -> str:
    """Return an answer with its numbers as math-verify reads them."""
    text = re.sub(r"(?<!\.)\.([}\s]*)$", r"\1", text.strip())  # a final full stop
    text = re.sub(r"\\approx|≈", "=", text).lstrip("= ")
    text = re.sub(r"\b[A-Za-z]{3,}(-[a-z]+)?\b", _number, text)
    text = re.sub(rf"(^|_\{{?){BOX}\{{(\d[^{{}}]*|[A-Z]+)\}}", r"\1\2", text)
    clock = rf"(\d)(:\d\d)?[\s~]*(?:{BOX}\{{)?\s*([AaPp])\.?[Mm]\b\.?\}}?"
    text = re.sub(clock, lambda x: f"{x[1]}{x[2] or ':00'} {x[3].lower()}clock", text)
    repeating = r"(\.\d*)\\(?:overline|bar|dot)\s*\{?(\d+)\}?"
    text = re.sub(repeating, lambda x: x[1] + 20 * x[2], text)
    text = re.sub(r"\\sqrt\s*\{-(1\})?", lambda x: " i" if x[1] else r" i\sqrt{", text)
    text = re.sub(r"(?<=\d)i\b", " i", text)
    if re.search(r"\\(?:sin|cos|tan|cot|sec|csc)", text):
        text = re.sub(rf"(\d+(?:\.\d+)?)\s*{DEGREE}", r"(\1\\pi/180)", text)
    text = re.sub(THOUSANDS, lambda found: re.sub(r"\D", "", found[0]), text)
    text = re.sub(rf"(?<![\w.}}^/])(\d+){SPACE}+(\d+) */ *(\d+)(?![\w.])", r"(\1+\2/\3)", text)
    text = re.sub(rf"(\d){SPACE}+(?=\\[dtc]?frac)", r"\1", text)  # both are mixed numbers
    for scale, power in SCALES.items():
        scaled = rf"\1 \\times 10^{{{power}}}\2"
        text = re.sub(rf"(\d){SPACE}*(\\text\{{)? *{scale}\b", scaled, text)
    text = re.sub(POWER_OF_TEN, _decimal, text)
    if text.count("$") == 1:
        text = re.sub(r"\\?\$\s*(\d[\d,.]*)", r"\1 dollars ", text)
    return text


def _decimal(found: re.Match[str]) -> str:
    *number, power = filter(None, found.groups())
    return f"{Decimal(f'{(*number, 1)[0]}e{power}'):f}"


def _number(word: re.Match[str]) -> str:
    """Return the number of a word, up to fifty from the names of Unicode's characters."""
    name = word[0].upper().replace("-", " ")
    for kind in ("DIGIT", "CIRCLED NUMBER", "AEGEAN NUMBER"):
        with suppress(KeyError):
            return f"{numeric(lookup(f'{kind} {name}')):.0f}"
    return word[0]


def _measured(text: str) -> tuple[str, str]:
    """Return an answer without its unit, and the unit: 5 and "km/h", 101 and "base2"."""
    flat = re.sub(rf"{BOX}|[{{}}]|{SPACE}", " ", text).strip()
    if re.fullmatch(f"(?:{QUANTITY}){{2,}}", flat):  # 5 hours 30 minutes
        parts = re.findall(QUANTITY, flat)
        total = sum(Fraction(number) * _size(unit) for number, unit in parts) / _size(parts[0][1])
        return (str(total), parts[0][1]) if total.is_number else (rf"\text{{{flat}}}", "")
    if found := re.fullmatch(r"(\d\w*?)_\{?(\d+)\}?", text):
        return found[1], f"base{found[2]}"
    if not (found := re.fullmatch(MEASURED, text)):
        return text, ""
    unit = re.sub(DEGREE, " degree ", found[2])
    return found[1], re.sub(rf"{BOX}|[{{}}.\\]|{SPACE}", " ", unit).strip()


@lru_cache(4096)
def _size(unit: str) -> Any:
    """Return the size of a unit with symbols for dimensions and unknown words."""
    from sympy import Rational, Symbol
    from sympy.physics import units

    size, known = Rational(1), {"dollar": Symbol("dollar")}
    for name, one in vars(units).items():
        if isinstance(one, units.Quantity):
            known[name] = one.scale_factor * one.dimension.name
    for name, number, base in re.findall(r"(\w+) (\S+) (\w+)", UNITS):
        known[name] = Rational(number) * known[base]
    unit = unit.replace("%", "percent").replace("mph", "mile/h")
    unit = re.sub(r"\b(?:sq|square|(cubic))\s+(\w+)", lambda x: f"{x[2]}^{3 if x[1] else 2}", unit)
    for over, word, power in re.findall(r"(/|per\b)?\s*([A-Za-z]+\d*)\s*\^?(\d?)", unit):
        small = word.lower().replace("tre", "ter")
        names = word, small, small.removesuffix("s")
        part = next((known[name] for name in names if name in known), Symbol(names[-1]))
        size *= part ** (int(power or 1) * (-1 if over else 1))
    return size


def _is_named(text: str) -> bool:
    """Whether each equation of an answer has a name on its left side: x = 7, f(2) = 7."""
    text = TEXT.sub(lambda found: "," if found[1] else "name", text)
    for _ in range(3):  # nested brackets
        text = re.sub(r"\\left|\\right|_\w|\^\{-1\}|_?\{[^{}]*\}|\([^()]*\)", "", text)
    for part in re.split(r"[,;]|\\quad|\b(?:and|or)\b", text):
        left, *right = re.split(r"(?<![\\<>!])=", part)
        if right and (CALCULATION.search(left) or not re.search("[A-Za-z]", left)):
            return False
    return True


@lru_cache(4096)  # the rollouts of a group share the correct answer, and often wrong ones
def _parsed(answer: str) -> list[Any]:
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse
    from sympy import MatrixBase, Tuple

    depth = [0]
    for c in answer:
        depth.append(depth[-1] + (c in "([{") - (c in ")]}"))
    if max(depth) > MOST_NESTED or TOO_LARGE.search(answer):
        return []
    form = NormalizationConfig(malformed_operators=True, nits=True)  # 2s has no unit
    config = LatexExtractionConfig(normalization_config=form)
    parsed = parse(f"\\boxed{{{answer}}}", [config], parsing_timeout=None)
    if parsed and isinstance(parsed[0], MatrixBase) and parsed[0].cols == 1:
        parsed[0] = Tuple(*parsed[0])
    return parsed
