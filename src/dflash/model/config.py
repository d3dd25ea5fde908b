"""The drafter's config: what the published DFlash drafters write, readable by the engines that serve them."""

from __future__ import annotations

from typing import Any

from transformers import Qwen3Config

_MIRRORED = ("block_size", "mask_token_id", "target_layer_ids")
LAYER_TYPES = ("full_attention", "sliding_attention")


class DrafterError(ValueError):
    """A config from which no drafter can be built; the sentence says which field."""


class DFlashConfig(Qwen3Config):
    """Shape of a drafter. ``model_type`` stays ``qwen3``, as in the published drafters that vLLM and SGLang load.

    ``block_size``, ``mask_token_id`` and ``target_layer_ids`` are written at top level (transformers' own decoding
    reads them there) and inside ``dflash_config`` (vLLM, SGLang); reading accepts either and refuses two that differ.

    Args:
        block_size: K, the anchor plus ``K - 1`` drafted tokens.
        mask_token_id: unused row of the target's embedding that fills the slots to draft.
        target_layer_ids: context layers; id ``l`` is the *output of decoder layer l* (``hidden_states[l + 1]``).
        num_target_layers: depth of the target the drafter was trained for.
        kwargs: everything of ``Qwen3Config``; ``hidden_size`` and ``vocab_size`` are the target's.

    Raises:
        DrafterError: a required field is absent, two spellings differ, or sliding layers have no usable window.
    """

    model_type = "qwen3"

    def __init__(
        self,
        block_size: int | None = None,
        mask_token_id: int | None = None,
        target_layer_ids: list[int] | None = None,
        num_target_layers: int | None = None,
        dflash_config: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        nested = dict(dflash_config or {})
        given = {"block_size": block_size, "mask_token_id": mask_token_id, "target_layer_ids": target_layer_ids}
        for key, value in given.items():
            if value is None:
                given[key] = nested.get(key)
            elif nested.get(key) not in (None, value):
                raise DrafterError(f"{key} is {value} at top level and {nested[key]} in dflash_config: keep one")
        kwargs.setdefault("architectures", ["DFlashDraftModel"])
        if any(kind == "sliding_attention" for kind in kwargs.get("layer_types") or ()):
            kwargs.setdefault("use_sliding_window", True)
        # transformers 5 moves a flat rope_theta into rope_parameters, but only where the latter is absent.
        super().__init__(**kwargs)
        self.block_size: Any = given["block_size"]
        self.mask_token_id: Any = given["mask_token_id"]
        self.target_layer_ids: Any = given["target_layer_ids"]
        self.num_target_layers = num_target_layers
        self.dflash_config = nested | {k: v for k, v in given.items() if v is not None}

    def require(self) -> DFlashConfig:
        """This config, if a drafter can be built from it.

        transformers builds configs without arguments (to find the defaults), so the check is not in ``__init__``.
        """
        missing = [key for key in _MIRRORED if getattr(self, key) is None]
        if missing:
            raise DrafterError(f"drafter config lacks {', '.join(missing)}: a published drafter always names them")
        if self.block_size < 2:
            raise DrafterError(f"block_size is {self.block_size}: a block is the anchor and at least one drafted token")
        layer_types = self.layer_types or []
        unknown = sorted(set(layer_types) - set(LAYER_TYPES))
        if unknown or len(layer_types) != self.num_hidden_layers:
            raise DrafterError(
                f"layer_types {layer_types} must name one of {', '.join(LAYER_TYPES)} for each of the "
                f"{self.num_hidden_layers} layers"
            )
        if "sliding_attention" in layer_types and (self.sliding_window or 0) < self.block_size:
            raise DrafterError(f"sliding_window is {self.sliding_window}: it must hold a block of {self.block_size}")
        return self

    def to_dict(self) -> dict[str, Any]:
        """JSON form. ``rope_theta`` is written flat as well, since several engines read only that."""
        out: dict[str, Any] = super().to_dict()
        rope = out.get("rope_parameters") or {}
        if "rope_theta" in rope:
            out["rope_theta"] = rope["rope_theta"]
        if out.get("dflash_config") is not None:
            out["dflash_config"] = out["dflash_config"] | {
                key: out[key] for key in _MIRRORED if out.get(key) is not None
            }
        return out
