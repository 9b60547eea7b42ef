import platform

import maxrl_fast

FLAG = "--version"


def version_text() -> str:
    import torch  # imported here: not all commands need torch

    try:
        from maxrl_fast import _C
    except ImportError as error:
        kernels = f"not built ({error})"
    else:
        kernels = f"C++ built, CUDA {'built' if _C.cuda else 'not built'}"
    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    return (
        f"maxrl_fast {maxrl_fast.__version__} (torch {torch.__version__}, {cuda}, Python "
        f"{platform.python_version()})\nkernels: {kernels}"
    )
