"""``dflash check CONFIG``: every section in turn, each in spite of what went wrong in those before."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dflash import estimate
from dflash.check.data import DataFound, check_data, check_mask_token
from dflash.check.model import check_layers, check_target
from dflash.check.page import Page
from dflash.check.placement import check_placement, check_rates
from dflash.config import Config, load_config, missing_files
from dflash.config_target import read_target_config, resolve
from dflash.target.load import load_tokenizer
from dflash.train.trackers import TrackerError, require_installed


def check(path: Path, overrides: Sequence[str] = ()) -> int:
    """Read what training would read, through the same functions, and print what was found.

    Args:
        path: the config's file.
        overrides: as for ``dflash train``.

    Returns:
        1 if a line failed, else 0.
    """
    page = Page()
    page.section(f"config {path}")
    resolved, target_config, is_there = _configs(page, path, overrides)
    if resolved is None:
        missing = "there is no target" if page.failed("target") else "the config must be right first"
        for name in ("data", "mask token", "layers", "placement", "target", "time"):
            page.not_run(name, missing)
        return page.close()
    tokenizer: Any = None
    if is_there:
        with page.guarded("tokenizer"):
            tokenizer = load_tokenizer(resolved.target.model, resolved.target.revision)
    data: DataFound | None = None
    if tokenizer is None:
        for name in ("data", "mask token"):
            page.not_run(name, "there is no tokenizer")
    else:
        with page.guarded("data"):
            data = check_data(page, resolved, target_config, tokenizer)
        with page.guarded("mask token"):
            check_mask_token(page, resolved, target_config, tokenizer, data.tokens if data else None)
    check_layers(page, resolved, target_config)
    with page.guarded("placement"):
        check_placement(page, resolved, target_config, data)
    measured = None
    if tokenizer is not None:
        measured = check_target(page, resolved, target_config, tokenizer, data)
    else:
        page.not_run("target", "there is no tokenizer")
    check_rates(page, resolved, target_config, data, measured)
    return page.close()


def _configs(page: Page, path: Path, overrides: Sequence[str]) -> tuple[Config | None, Any, bool]:
    """The config resolved against the target's (None if it is faulty), the target's, and whether the target itself was
    found: its sizes may come from ``target.config``."""
    config: Config | None = None
    target_config: Any = None
    resolved: Config | None = None
    with page.guarded("config"):
        config = load_config(path, overrides, check_files=False)
    if config is None:
        return None, None, False
    for problem in missing_files(config):
        if not problem.startswith("target.model "):  # comes next, with all that it may name
            page.line("fail", "files", problem)
    with page.guarded("target"):
        target_config = estimate.find_target_config(config, weights_needed=True)
    is_there = target_config is not None
    if not is_there and config.target.config:
        with page.guarded("target.config"):
            target_config = read_target_config(config.target.config)
            page.line("warn", "target.config", f"sizes are taken from {config.target.config}")
    if target_config is None:
        return None, None, False
    with page.guarded("config"):
        resolved = resolve(config, target_config)
        page.line("pass", "config", f"reads well; target {config.target.model}, run in {config.run_dir}")
    try:
        require_installed(config.log.trackers)
    except TrackerError as error:
        page.line("fail", "trackers", str(error))
    return resolved, target_config, is_there
