"""Find the boxed answer of a solution."""

OPEN = "\\boxed{"


def boxed(text: str) -> str:
    """Return the content of the last \\boxed{...}, stripped; "" if there is no box, or the last one is not closed.

    Braces in the content are balanced, and escaped braces are not counted. A box inside another box is part of its content.
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
