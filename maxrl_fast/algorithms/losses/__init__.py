"""The token losses, one function each. Importing this package fills LOSSES."""

from dataclasses import replace

from maxrl_fast.algorithms.losses import functions as functions
from maxrl_fast.algorithms.losses.registry import ALIASES as ALIASES
from maxrl_fast.algorithms.losses.registry import LOSSES as LOSSES
from maxrl_fast.algorithms.losses.registry import token_loss as token_loss

# Liu et al. 2026, arXiv:2602.05261, compared with TRL
ALIASES["luspo"] = replace(LOSSES["gspo"], aggregation="seq_mean_token_sum")
