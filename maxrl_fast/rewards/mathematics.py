"""Whether two mathematical answers are equal: math-verify, with forms of numbers, units and
equations that it misreads, and without what is too large to compute.
"""

import re
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from typing import Any

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
SCALES = {"thousand": 3, "million": 6, "billion": 9}
UNITS = {
    word: (kind, int(size))
    for kind, units in enumerate(
        (
            "s 1 sec 1 second 1 min 60 minute 60 h 3600 hr 3600 hour 3600 day 86400 week 604800",
            "mm 1 cm 10 centimeter 10 m 1000 meter 1000 km 1000000 kilometer 1000000",
            "in 1 inch 1 ft 12 foot 12 feet 12 yard 36 mile 63360",
            "cent 1 dollar 100",
        )
    )
    for word, size in re.findall(r"(\w+) (\d+)", units)
}
QUANTITY = r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)\.?\s*(?:,|and\b)?\s*"
TEXT = re.compile(r"\\(?:text|mbox|mathrm)\w*\s*\{\s*(and\b|or\b)?[^{}]*\}")
CALCULATION = re.compile(r"[\d+\-*/^!%]|\\(?:\w?frac|sqrt|cdot|times|div|pm|sin|cos|tan|log|ln)")


def equal(answer: str, given: str) -> bool:
    """Return whether a given answer equals the correct one, as text or mathematically."""
    from math_verify import verify

    answer, given = _plain(answer), _plain(given)
    if given == answer:
        return True
    (num_known, known), (num_found, found) = _quantities(answer), _quantities(given)
    if max(num_known, num_found) > 1 or (known and found):
        return known == found is not None
    if "=" not in answer and not _is_named(given):
        return False
    # 6 decimal places; of small numbers 5 significant digits, of large ones 11
    zeros = max(map(len, re.findall(r"(?<!\d)0?\.(0*)[1-9]", answer)), default=0)
    whole = max(map(len, re.findall(r"\d+(?=\.)", answer)), default=0)
    places = max(6, 5 + zeros) if zeros else max(1, min(6, 12 - whole))
    # verify is not symmetric: the correct answer is first. The pool has its own time limit.
    return bool(verify(_parsed(answer), _parsed(given), places, timeout_seconds=None))


def _plain(text: str) -> str:
    """Return an answer with its numbers as math-verify reads them."""
    text = re.sub(r"(?<!\.)\.([}\s]*)$", r"\1", text.strip())  # a final full stop
    text = re.sub(THOUSANDS, lambda found: re.sub(r"\D", "", found[0]), text)
    text = re.sub(rf"(?<![\w.}}^/])(\d+){SPACE}+(\d+) */ *(\d+)(?![\w.])", r"(\1+\2/\3)", text)
    text = re.sub(rf"(\d){SPACE}+(?=\\[dtc]?frac)", r"\1", text)  # both are mixed numbers
    for scale, power in SCALES.items():
        many = rf"\1 \\times 10^{{{power}}}\2"
        text = re.sub(rf"(\d){SPACE}*(\\text\{{)? *{scale}\b", many, text)
    return re.sub(POWER_OF_TEN, _decimal, text)


def _decimal(found: re.Match[str]) -> str:
    *number, power = filter(None, found.groups())
    return f"{Decimal(f'{number[0] if number else 1}e{power}'):f}"


def _quantities(text: str) -> tuple[int, tuple[int, Fraction] | None]:
    """Return the number of quantities in an answer that is nothing else, such as 2 in 5 hours 30
    minutes; and the kind of their units with their sum, None if it is not known.
    """
    text = re.sub(rf"\\(?:text|mathrm|mbox)\b|[{{}}]|{SPACE}", " ", text).strip()
    found = re.findall(QUANTITY, text) if re.fullmatch(f"(?:{QUANTITY})+", text) else []
    kinds, total = set[int](), Fraction(0)
    for number, word in found:
        names = (word.lower(), word.lower().removesuffix("s"), word.lower().removesuffix("es"))
        kind, size = next((UNITS[name] for name in names if name in UNITS), (-1, 0))
        kinds.add(kind)
        total += size * Fraction(number)
    return len(found), (min(kinds), total) if len(kinds) == 1 and -1 not in kinds else None


def _is_named(text: str) -> bool:
    """Return whether each equation of an answer has a name on its left side: x = 7, f(2) = 7."""
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
    from math_verify import LatexExtractionConfig, parse

    depth = [0]
    for c in answer:
        depth.append(depth[-1] + (c in "([{") - (c in ")]}"))
    if max(depth) > MOST_NESTED or len(answer) > 5000 or TOO_LARGE.search(answer):
        return []
    answer = re.sub(r"(?<=[\d)])\s+[a-z]{3,}(?: [a-z]+)*$", "", answer)  # 5 dollars
    return parse(f"\\boxed{{{answer}}}", [LatexExtractionConfig()], parsing_timeout=None)
