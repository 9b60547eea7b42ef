"""Checks whether the Hugging Face hub answers. Its libraries would retry for half a minute first."""

import threading

SECONDS = 2.0  # to look up the hub's name, connect and get an answer


def why_unreachable() -> str:
    """Return within SECONDS why the hub cannot be reached, or "". HF_ENDPOINT, HF_HUB_OFFLINE and proxies are respected.

    Raises ImportError if huggingface_hub is not installed.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session  # type: ignore[attr-defined]

    causes = [f"{constants.ENDPOINT} does not answer within {SECONDS:g} s"]

    def ask() -> None:
        try:
            status = get_session().head(constants.ENDPOINT, timeout=SECONDS).status_code
            causes.append(f"{constants.ENDPOINT} answers with status {status}" if status >= 500 else "")
        except Exception as error:  # network, TLS, proxy, or HF_HUB_OFFLINE
            causes.append(f"{constants.ENDPOINT}: {type(error).__name__}: {error}".partition("\n")[0])

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    thread = threading.Thread(target=ask, name="hub", daemon=True)  # name resolution has no time limit
    thread.start()
    thread.join(SECONDS)
    return causes[-1]
