"""The answer that a solution gives in a box."""

OPEN = "\\boxed{"


def boxed(text: str) -> str:
    """What the last \\boxed{...} holds, its braces balanced, stripped; "" where there is none, or it is not closed.

    A box inside another is part of the outer one's content; an escaped brace is a character like any other.
    """
    found, start = "", text.find(OPEN)
    while start >= 0:
        i, depth = start + len(OPEN), 1
        while i < len(text) and depth:
            if text[i] == "\\":
                i += 1
            elif text[i] in "{}":
                depth += 1 if text[i] == "{" else -1
            i += 1
        found = "" if depth else text[start + len(OPEN) : i - 1].strip()
        start = text.find(OPEN, i)
    return found
