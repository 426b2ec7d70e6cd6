"""Processes of torchrun end with it. This module loads no torch, so that it can be called early."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # of Linux's prctl


def end_with_torchrun() -> None:
    """If torchrun started this process, the kernel kills it when torchrun dies.

    torchrun stops its processes when it ends, but not if it is killed with SIGKILL. They would
    train on without it, and hold their GPUs and the run's folder. Does nothing for processes that
    were started in another way, or outside Linux.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
