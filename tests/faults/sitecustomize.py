"""Faults for workers of a run, by environment: imported by every Python that has this folder on its PYTHONPATH.

``DFLASH_TEST_FAULT`` is ``KIND:LOCAL_RANK``; the process with that local rank has the fault, from its fourth capture
on; ``slow``, which has every capture last 0.2 s longer, also keeps a tiny run from ending before a test has killed it.
"""

import os
import time

kind, _, rank = os.environ.get("DFLASH_TEST_FAULT", "").partition(":")
if kind and os.environ.get("LOCAL_RANK") == rank:
    from dflash.target import model

    if kind == "never_ready":
        model.load_target = lambda *args, **kwargs: time.sleep(600)
    whole, count = model.Target.capture, 0

    def capture(self, rows, masks, ids, pad_to=None):
        global count
        count += 1
        features = whole(self, rows, masks, ids, pad_to)
        if kind == "slow":
            time.sleep(0.2)
        if count > 3:
            if kind == "raise":
                raise RuntimeError("CUDA error: an illegal memory access was encountered")
            if kind == "zero":
                features.context.zero_()
            if kind == "nan":
                features.context[2, 1] = float("nan")
            if kind == "hang":
                os.kill(os.getpid(), 19)
        return features

    model.Target.capture = capture
