"""``dflash check``: what training would see, before it runs."""

from dflash.check.preflight import check

__all__ = ["check"]
